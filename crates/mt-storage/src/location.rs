//! The store and the key that a path names.

use std::{io, path::Path};

use crate::error::StorageError;

/// The protocol of a remote path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Scheme {
    S3,
    Google,
    Azure,
    Memory,
}

const SCHEMES: &[(&str, Scheme)] = &[
    ("s3://", Scheme::S3),
    ("gs://", Scheme::Google),
    ("az://", Scheme::Azure),
    ("memory://", Scheme::Memory),
];

/// A key in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub scheme: Scheme,
    pub bucket: String,
    pub key: object_store::path::Path,
}

/// Whether a path names an object store. A path with the scheme of another service, such as `hdfs://`, does not.
pub fn is_remote(path: &Path) -> bool {
    scheme(path).is_some()
}

/// Whether a path names the Hugging Face hub.
pub fn is_hub(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with("hf://"))
}

fn scheme(path: &Path) -> Option<(Scheme, &str)> {
    let text = path.to_str()?;
    SCHEMES.iter().find_map(|(prefix, scheme)| Some((*scheme, text.strip_prefix(prefix)?)))
}

impl Location {
    /// The location of a remote path.
    ///
    /// # Errors
    /// The bucket has no name, or the key is not one of an object store.
    pub fn of(path: &Path) -> io::Result<Self> {
        let invalid = |reason: String| {
            let hint = "write it as `s3://bucket/key`, `gs://bucket/key` or `az://container/key`";
            StorageError::wrong(path, reason, hint)
        };
        let (scheme, rest) = scheme(path).ok_or_else(|| invalid("it names no object store".to_owned()))?;
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(invalid("it names no bucket".to_owned()));
        }
        // `join` and `.` leave segments that change nothing.
        let segments: Vec<&str> =
            key.split('/').filter(|segment| !segment.is_empty() && *segment != ".").collect();
        if segments.contains(&"..") {
            return Err(invalid("keys of object stores have no `..`".to_owned()));
        }
        let key = object_store::path::Path::parse(segments.join("/"))
            .map_err(|error| invalid(error.to_string()))?;
        Ok(Self { scheme, bucket: bucket.to_owned(), key })
    }
}

impl Scheme {
    pub fn name(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Google => "gs",
            Self::Azure => "az",
            Self::Memory => "memory",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_buckets_and_keys() {
        for (path, bucket, key) in [
            ("s3://bucket/a/b", "bucket", "a/b"),
            ("gs://bucket", "bucket", ""),
            ("az://bucket/", "bucket", ""),
            ("gs://bucket/./a//b/", "bucket", "a/b"),
        ] {
            let location = Location::of(Path::new(path)).unwrap();
            assert_eq!((location.bucket.as_str(), location.key.as_ref()), (bucket, key), "{path}");
        }
        assert_eq!(Location::of(&Path::new("gs://bucket").join("a").join("b")).unwrap().key.as_ref(), "a/b");
        assert_eq!(Path::new("gs://bucket/a").parent(), Some(Path::new("gs://bucket")));
        for path in ["s3:///a", "gs://", "s3://bucket/../other"] {
            assert!(Location::of(Path::new(path)).is_err(), "{path}");
        }
        for path in ["bucket/a", "/s3:/bucket", "s3:/bucket/a", "hdfs://a/b", "gs:"] {
            assert!(!is_remote(Path::new(path)), "{path}");
        }
    }
}
