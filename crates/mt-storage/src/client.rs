//! Clients of the stores, one for each bucket, and the runtime on which requests run.

use std::{
    collections::HashMap,
    future::Future,
    io,
    path::Path,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use object_store::{
    BackoffConfig, ClientOptions, ObjectStore, RetryConfig, StaticCredentialProvider,
    aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut},
    azure::{AzureConfigKey, MicrosoftAzureBuilder},
    gcp::{GcpCredential, GoogleCloudStorageBuilder, GoogleConfigKey},
    memory::InMemory,
    multipart::MultipartStore,
};
use tokio::runtime::Runtime;

use crate::{
    credentials,
    error::StorageError,
    location::{Location, Scheme},
};

/// Requests that one call has in flight.
pub(crate) const CONCURRENT: usize = 16;

/// The client of a bucket.
#[derive(Clone)]
pub(crate) struct Client {
    pub store: Arc<dyn ObjectStore>,
    pub parts: Arc<dyn MultipartStore>,
}

static IS_DISCONNECTED: AtomicBool = AtomicBool::new(false);

/// Makes all later requests of this process to stores fail at once, and the hub's cache answer for the hub, for programs
/// that check values without a network.
pub fn disconnect() {
    IS_DISCONNECTED.store(true, Ordering::Relaxed);
}

/// Whether this process makes no requests; see [`disconnect`].
pub fn is_disconnected() -> bool {
    IS_DISCONNECTED.load(Ordering::Relaxed)
}

/// The client of a path's bucket, and the location in it.
///
/// # Errors
/// The path or an environment variable is wrong, or the process is disconnected.
pub(crate) fn of(path: &Path) -> io::Result<(Client, Location)> {
    let location = Location::of(path)?;
    if is_disconnected() {
        return Err(StorageError::failed(io::ErrorKind::NotConnected, "this process is disconnected", ""));
    }
    static CLIENTS: OnceLock<Mutex<HashMap<(Scheme, String), Client>>> = OnceLock::new();
    let clients = CLIENTS.get_or_init(Mutex::default);
    let mut clients = clients.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (location.scheme, location.bucket.clone());
    if let Some(client) = clients.get(&key) {
        return Ok((client.clone(), location));
    }
    let client = build(&location)?;
    clients.insert(key, client.clone());
    Ok((client, location))
}

/// Runs a request and waits for its result. It may be called on any thread, also one that drives another runtime.
pub(crate) fn wait<T: Send + 'static>(request: impl Future<Output = T> + Send + 'static) -> T {
    let (sender, receiver) = mpsc::sync_channel(1);
    runtime().spawn(async move {
        // The receiver waits below, so that it exists.
        let _ = sender.send(request.await);
    });
    receiver.recv().expect("requests do not panic and the runtime outlives them")
}

/// The runtime of all requests.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        // The first provider that is installed is that of the process.
        let _ = rustls::crypto::ring::default_provider().install_default();
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("storage")
            .enable_all()
            .build()
            .expect("the system starts two threads")
    })
}

fn build(location: &Location) -> io::Result<Client> {
    runtime();
    let invalid = |error: object_store::Error| StorageError::of_request(location, &error);
    match location.scheme {
        Scheme::S3 => {
            amazon(&location.bucket).and_then(|builder| builder.build().map_err(invalid)).map(Client::new)
        }
        Scheme::Google => google(&location.bucket).build().map_err(invalid).map(Client::new),
        Scheme::Azure => azure(&location.bucket).build().map_err(invalid).map(Client::new),
        Scheme::Memory => Ok(Client::new(InMemory::new())),
    }
}

impl Client {
    fn new(store: impl ObjectStore + MultipartStore) -> Self {
        let store = Arc::new(store);
        Self { store: store.clone(), parts: store }
    }
}

/// The value of an environment variable that is not empty.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn is_plain_http(endpoint: Option<&str>) -> bool {
    endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"))
}

fn options(endpoint: Option<&str>) -> ClientOptions {
    ClientOptions::new()
        .with_allow_http(is_plain_http(endpoint))
        .with_connect_timeout(Duration::from_secs(10))
        .with_timeout(Duration::from_secs(120))
}

fn retry() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(200),
            max_backoff: Duration::from_secs(15),
            base: 2.0,
        },
        max_retries: 6,
        retry_timeout: Duration::from_secs(150),
    }
}

/// A builder with the settings of the environment and of the files of Amazon's own tools.
fn amazon(bucket: &str) -> io::Result<AmazonS3Builder> {
    let profile = credentials::Profile::of_environment()?;
    let mut builder = AmazonS3Builder::from_env();
    let region = variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION"));
    builder =
        builder.with_region(region.or(profile.region.clone()).unwrap_or_else(|| "us-east-1".to_owned()));
    let endpoint =
        variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL")).or(profile.endpoint.clone());
    if let Some(endpoint) = &endpoint {
        builder = builder.with_config(AmazonS3ConfigKey::Endpoint, endpoint);
    }
    if variable("AWS_ACCESS_KEY_ID").is_none()
        && let Some(provider) = profile.into_provider()
    {
        builder = builder.with_credentials(Arc::new(provider));
    }
    Ok(builder
        .with_bucket_name(bucket)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_client_options(options(endpoint.as_deref()))
        .with_retry(retry()))
}

/// A builder with the settings of the environment. `STORAGE_EMULATOR_HOST` is the variable of Google's own clients; a
/// server that it names takes requests without signatures.
fn google(bucket: &str) -> GoogleCloudStorageBuilder {
    let mut builder = GoogleCloudStorageBuilder::from_env();
    let emulator = variable("STORAGE_EMULATOR_HOST").map(|host| match host.contains("://") {
        true => host.trim_end_matches('/').to_owned(),
        false => format!("http://{host}"),
    });
    if let Some(emulator) = &emulator {
        // The crate needs a token for some writes even then.
        let token = GcpCredential { bearer: "emulator".to_owned() };
        builder = builder
            .with_base_url(emulator)
            .with_config(GoogleConfigKey::SkipSignature, "true")
            .with_credentials(Arc::new(StaticCredentialProvider::new(token)));
    }
    builder.with_bucket_name(bucket).with_client_options(options(emulator.as_deref())).with_retry(retry())
}

/// A builder with the settings of the environment, also of the names that Azure's command line has for them.
fn azure(container: &str) -> MicrosoftAzureBuilder {
    let mut builder = MicrosoftAzureBuilder::from_env();
    let mut endpoint = variable("AZURE_STORAGE_ENDPOINT");
    let own_names = [
        ("AZURE_STORAGE_ACCOUNT", AzureConfigKey::AccountName),
        ("AZURE_STORAGE_KEY", AzureConfigKey::AccessKey),
        ("AZURE_STORAGE_SAS_TOKEN", AzureConfigKey::SasKey),
    ];
    for (name, key) in own_names {
        if let Some(value) = variable(name) {
            builder = builder.with_config(key, value);
        }
    }
    for (name, value) in connection_string().iter().flatten() {
        match name.as_str() {
            "AccountName" => builder = builder.with_account(value),
            "AccountKey" => builder = builder.with_access_key(value),
            "SharedAccessSignature" => builder = builder.with_config(AzureConfigKey::SasKey, value),
            "BlobEndpoint" => endpoint = endpoint.or_else(|| Some(value.clone())),
            _ => {}
        }
    }
    if let Some(endpoint) = &endpoint {
        builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
    }
    builder
        .with_container_name(container)
        .with_client_options(options(endpoint.as_deref()))
        .with_retry(retry())
}

/// The settings in `AZURE_STORAGE_CONNECTION_STRING`.
fn connection_string() -> Option<Vec<(String, String)>> {
    let text = variable("AZURE_STORAGE_CONNECTION_STRING")?;
    let settings = text.split(';').filter_map(|setting| setting.split_once('='));
    Some(settings.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned())).collect())
}
