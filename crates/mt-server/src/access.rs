//! API keys.

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

/// The keys that clients may present. Without keys, every client is served.
#[derive(Clone, Default)]
pub struct ApiKeys {
    /// Only digests are kept: a comparison of digests reveals nothing of a key by its time, and all have one length.
    digests: Vec<[u8; 32]>,
}

impl ApiKeys {
    /// The keys in a text, one on each line; surrounding white space and empty lines do not count.
    pub fn parse(text: &str) -> Self {
        let keys = text.lines().map(str::trim).filter(|line| !line.is_empty());
        Self { digests: keys.map(digest).collect() }
    }

    /// Whether every client is served.
    pub fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }

    /// The number of keys.
    pub fn len(&self) -> usize {
        self.digests.len()
    }

    /// Whether a request presents a key: `Authorization: Bearer KEY` as OpenAI's clients do, or `x-api-key: KEY` as
    /// Anthropic's.
    pub(crate) fn admit(&self, headers: &HeaderMap) -> bool {
        if self.is_empty() {
            return true;
        }
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        // Names of schemes have no case.
        let bearer = bearer.and_then(|value| value.split_once(' '));
        let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key);
        let named = headers.get("x-api-key").and_then(|value| value.to_str().ok());
        bearer.into_iter().chain(named).any(|key| self.contains(key.trim()))
    }

    fn contains(&self, key: &str) -> bool {
        let given = digest(key);
        // All keys are compared to their ends, so that the time does not depend on where they differ.
        let is_equal = |known: &[u8; 32]| {
            let difference = known.iter().zip(&given).fold(0, |sum, (left, right)| sum | (left ^ right));
            std::hint::black_box(difference) == 0
        };
        self.digests.iter().fold(false, |found, known| found | is_equal(known))
    }
}

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} keys", self.len())
    }
}

fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(keys: &ApiKeys, name: &'static str, value: &'static str, expected: bool) {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        assert_eq!(keys.admit(&headers), expected, "{name}: {value}");
    }

    #[test]
    fn keys_are_read_from_both_headers() {
        let keys = ApiKeys::parse("first\n\n  second \n");
        assert_eq!(keys.len(), 2);
        check(&keys, "authorization", "Bearer first", true);
        check(&keys, "x-api-key", "second", true);
        check(&keys, "authorization", "bearer  first", true);
        check(&keys, "authorization", "Bearer third", false);
        check(&keys, "authorization", "Basic first", false);
        check(&keys, "authorization", "first", false);
        check(&keys, "x-api-key", "", false);
        assert!(!keys.admit(&HeaderMap::new()));
        assert!(ApiKeys::default().admit(&HeaderMap::new()));
        assert_eq!(format!("{keys:?}"), "2 keys");
    }
}
