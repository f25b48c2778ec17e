//! Writing objects: conditional puts, uploads in pieces, copies and removals.

use std::{
    collections::{VecDeque, hash_map::RandomState},
    fs::File,
    hash::BuildHasher,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{
    MultipartId, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion, multipart::PartId,
};
use tokio::task::JoinHandle;

use crate::{
    cache,
    client::{self, CONCURRENT, Client},
    error::StorageError,
    is_remote,
    location::Location,
    read,
};

/// Bytes of a piece that is sent by itself. A store takes at most 10,000 of them, which makes 160 GB.
const PART: usize = 16 << 20;
/// Pieces of one upload that are sent at the same time.
const PARTS_IN_FLIGHT: usize = 4;

/// The condition on which an object is written.
#[derive(Clone, Debug)]
pub enum Condition {
    /// Nothing: an older object is replaced.
    Any,
    /// No object has this key.
    New,
    /// The object is still the one of this version.
    Unchanged(Version),
}

/// A version of an object.
#[derive(Clone, Debug)]
pub struct Version(pub(crate) UpdateVersion);

/// Writes a whole object, at once or not at all. Returns its version.
///
/// # Errors
/// The condition does not hold (`AlreadyExists`), or the store refuses.
pub fn put(path: &Path, contents: impl Into<Vec<u8>>, condition: Condition) -> io::Result<Version> {
    let (client, location) = client::of(path)?;
    let contents = Bytes::from(contents.into());
    client::wait(async move {
        let is_conditional = !matches!(condition, Condition::Any);
        let mode = match condition {
            Condition::Any => PutMode::Overwrite,
            Condition::New => PutMode::Create,
            Condition::Unchanged(Version(version)) => PutMode::Update(version),
        };
        let options = PutOptions { mode, ..PutOptions::default() };
        let payload = PutPayload::from_bytes(contents.clone());
        match client.store.put_opts(&location.key, payload, options).await {
            Ok(put) => Ok(Version(UpdateVersion { e_tag: put.e_tag, version: put.version })),
            Err(error) if is_conditional && is_unmet(&error) => {
                // If the answer to a first attempt was lost, its repetition meets the object that it wrote.
                match client.store.get(&location.key).await {
                    Ok(found) => {
                        let meta = found.meta.clone();
                        match found.bytes().await {
                            Ok(bytes) if bytes == contents => {
                                Ok(Version(UpdateVersion { e_tag: meta.e_tag, version: meta.version }))
                            }
                            _ => Err(StorageError::of_request(&location, &error)),
                        }
                    }
                    Err(_) => Err(StorageError::of_request(&location, &error)),
                }
            }
            Err(error) => Err(StorageError::of_request(&location, &error)),
        }
    })
}

fn is_unmet(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. })
}

/// The contents of an object with its version.
pub(crate) fn read_versioned(path: &Path) -> io::Result<(Vec<u8>, Version)> {
    let (client, location) = client::of(path)?;
    client::wait(async move {
        let failed = |error| StorageError::of_request(&location, &error);
        let found = client.store.get(&location.key).await.map_err(failed)?;
        let version = UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
        Ok((found.bytes().await.map_err(failed)?.to_vec(), Version(version)))
    })
}

/// An object that is written piece by piece and appears when it is finished. A small one is put at once. The pieces of
/// a larger one are sent while further ones come; a record of the upload is kept beside it until then, so that pieces of a
/// process that was killed can be given up by [`abort_uploads`].
pub struct Upload {
    path: PathBuf,
    client: Client,
    location: Location,
    records: Option<PathBuf>,
    buffer: Vec<u8>,
    started: Option<Started>,
}

struct Started {
    id: MultipartId,
    record: Option<PathBuf>,
    sent: Vec<PartId>,
    in_flight: VecDeque<JoinHandle<object_store::Result<PartId>>>,
    next: usize,
}

impl Upload {
    /// Begins an object. `records` is the directory of the records of uploads.
    ///
    /// # Errors
    /// The path is wrong.
    pub fn new(path: &Path, records: Option<&Path>) -> io::Result<Self> {
        let (client, location) = client::of(path)?;
        let records = records.map(Path::to_owned);
        Ok(Self { path: path.to_owned(), client, location, records, buffer: Vec::new(), started: None })
    }

    /// Adds a piece.
    ///
    /// # Errors
    /// A piece cannot be sent.
    pub fn write(&mut self, mut piece: &[u8]) -> io::Result<()> {
        while self.buffer.len() + piece.len() >= PART {
            let (now, later) = piece.split_at(PART - self.buffer.len());
            self.buffer.extend_from_slice(now);
            piece = later;
            let part = std::mem::take(&mut self.buffer);
            self.send(part)?;
        }
        self.buffer.extend_from_slice(piece);
        Ok(())
    }

    /// Completes the object.
    ///
    /// # Errors
    /// A piece cannot be sent, or the store refuses the object.
    pub fn finish(mut self) -> io::Result<()> {
        let rest = std::mem::take(&mut self.buffer);
        if self.started.is_none() {
            return put(&self.path, rest, Condition::Any).map(|_| ());
        }
        if !rest.is_empty() {
            self.send(rest)?;
        }
        let mut started = self.started.take().expect("an upload has started");
        let (client, location) = (self.client.clone(), self.location.clone());
        let record = started.record.clone();
        client::wait(async move {
            let complete = async {
                while let Some(part) = started.in_flight.pop_front() {
                    started.sent.push(part.await??);
                }
                client.parts.complete_multipart(&location.key, &started.id, started.sent).await
            };
            match complete.await {
                Ok(_) => Ok(()),
                Err(error) => {
                    let _ = client.parts.abort_multipart(&location.key, &started.id).await;
                    Err(StorageError::of_request(&location, &error))
                }
            }
        })?;
        record.map_or(Ok(()), |record| remove(&record))
    }

    fn send(&mut self, part: Vec<u8>) -> io::Result<()> {
        if self.started.is_none() {
            self.started = Some(self.start()?);
        }
        let started = self.started.as_mut().expect("an upload has started");
        if started.in_flight.len() >= PARTS_IN_FLIGHT
            && let Some(oldest) = started.in_flight.pop_front()
        {
            let sent = client::wait(oldest).map_err(io::Error::other)?;
            started.sent.push(sent.map_err(|error| StorageError::of_request(&self.location, &error))?);
        }
        let (client, key, id, index) =
            (self.client.clone(), self.location.key.clone(), started.id.clone(), started.next);
        let payload = PutPayload::from_bytes(Bytes::from(part));
        started.next += 1;
        started.in_flight.push_back(
            client::runtime().spawn(async move { client.parts.put_part(&key, &id, index, payload).await }),
        );
        Ok(())
    }

    fn start(&self) -> io::Result<Started> {
        let (client, location) = (self.client.clone(), self.location.clone());
        let id = client::wait(async move {
            let id = client.parts.create_multipart(&location.key).await;
            id.map_err(|error| StorageError::of_request(&location, &error))
        })?;
        let record = match &self.records {
            None => None,
            Some(records) => {
                let record = records.join(format!("{:016x}", RandomState::new().hash_one(&id)));
                put(&record, format!("{}\n{id}", self.location.key), Condition::Any)?;
                Some(record)
            }
        };
        Ok(Started { id, record, sent: Vec::new(), in_flight: VecDeque::new(), next: 0 })
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(started) = self.started.take() else { return };
        started.in_flight.iter().for_each(JoinHandle::abort);
        let (client, location) = (self.client.clone(), self.location.clone());
        client::wait(async move {
            for part in started.in_flight {
                let _ = part.await;
            }
            // The error that ended the upload is the one to report; the record stays if this fails, too.
            let _ = client.parts.abort_multipart(&location.key, &started.id).await;
        });
    }
}

/// Gives up the uploads of a process that ended, by the records in a directory, and removes the records.
///
/// # Errors
/// The store refuses.
pub fn abort_uploads(records: &Path) -> io::Result<()> {
    let (client, location) = client::of(records)?;
    for object in read::objects_below(client.clone(), location.clone())? {
        let (client, location) = (client.clone(), location.clone());
        client::wait(async move {
            let failed = |error| StorageError::of_request(&location, &error);
            let record = client.store.get(&object.location).await.map_err(failed)?;
            let record = record.bytes().await.map_err(failed)?;
            if let Some((key, id)) = String::from_utf8_lossy(&record).split_once('\n')
                && let Ok(key) = object_store::path::Path::parse(key)
            {
                // An upload that was completed or given up is no longer known.
                match client.parts.abort_multipart(&key, &id.to_owned()).await {
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                    Err(error) => return Err(failed(error)),
                }
            }
            client.store.delete(&object.location).await.map_err(failed)
        })?;
    }
    Ok(())
}

/// Removes an object. One that does not exist counts as removed.
///
/// # Errors
/// The store refuses.
pub fn remove(path: &Path) -> io::Result<()> {
    let (client, location) = client::of(path)?;
    client::wait(async move {
        match client.store.delete(&location.key).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(StorageError::of_request(&location, &error)),
        }
    })
}

/// Removes all objects below a path, with the names in `first` before all others.
///
/// # Errors
/// The store refuses.
pub fn remove_all(path: &Path, first: &[&str]) -> io::Result<()> {
    for name in first {
        remove(&path.join(name))?;
    }
    let (client, location) = client::of(path)?;
    let objects = read::objects_below(client.clone(), location.clone())?;
    client::wait(async move {
        let deleted = stream::iter(objects)
            .map(|object| {
                let client = client.clone();
                async move {
                    match client.store.delete(&object.location).await {
                        Err(object_store::Error::NotFound { .. }) => Ok(()),
                        result => result,
                    }
                }
            })
            .buffer_unordered(CONCURRENT)
            .try_collect::<Vec<()>>()
            .await;
        deleted.map(|_| ()).map_err(|error| StorageError::of_request(&location, &error))
    })
}

/// Copies a file between any two of disks and stores.
///
/// # Errors
/// The file cannot be read, or its copy cannot be written.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    match (is_remote(from), is_remote(to)) {
        (false, false) => std::fs::copy(from, to).map(|_| ()),
        (false, true) => upload_file(from, to),
        (true, false) => {
            let mut file = File::create(to)?;
            let bytes = read::metadata(from)?.bytes;
            io::copy(&mut read::reader(from, 0..bytes)?, &mut file)?;
            file.flush()
        }
        (true, true) => {
            let ((client, source), (_, target)) = (client::of(from)?, client::of(to)?);
            if (source.scheme, &source.bucket) == (target.scheme, &target.bucket) {
                return client::wait(async move {
                    let copied = client.store.copy(&source.key, &target.key).await;
                    copied.map_err(|error| StorageError::of_request(&source, &error))
                });
            }
            let bytes = read::metadata(from)?.bytes;
            upload(read::reader(from, 0..bytes)?, to)
        }
    }
}

/// Writes a local file to a store.
///
/// # Errors
/// The file cannot be read, or the object cannot be written.
pub fn upload_file(from: &Path, to: &Path) -> io::Result<()> {
    let file = File::open(from)?;
    let total = file.metadata()?.len();
    let progress = cache::Reporting::new(to, total, cache::Direction::Up);
    upload(progress.of(file), to)
}

fn upload(mut from: impl Read, to: &Path) -> io::Result<()> {
    let mut upload = Upload::new(to, None)?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return upload.finish(),
            Ok(count) => upload.write(&buffer[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
