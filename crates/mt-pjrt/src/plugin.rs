//! Loading and calling a plugin.

use std::{
    collections::HashMap,
    ffi::{c_char, c_int, c_void},
    fmt,
    path::{Path, PathBuf},
    slice,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{
    Error, ErrorCode, PjrtError,
    discover::packages_of,
    sys::{self, Arguments},
};

/// A loaded plugin. It is never unloaded, because its threads outlive every client.
#[derive(Clone)]
pub struct Plugin {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    api: &'static sys::Api,
}

// SAFETY: the table of functions is constant once the library is loaded, and PJRT functions may be called from any
// thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

static LOADED: Mutex<Option<HashMap<PathBuf, Plugin>>> = Mutex::new(None);

impl Plugin {
    /// Loads the plugin at `path` and initializes it. Later calls return the loaded plugin.
    ///
    /// # Errors
    /// The file is not a PJRT plugin, its API is too old, or its initialization fails.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let path = path.canonicalize().map_err(|source| Error::io(path, source))?;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        if let Some(plugin) = loaded.get(&path) {
            return Ok(plugin.clone());
        }
        let plugin = Self::open(&path)?;
        loaded.insert(path, plugin.clone());
        Ok(plugin)
    }

    fn open(path: &Path) -> Result<Self, Error> {
        let load_error = |source| Error::Load { path: path.to_owned(), source };
        // SAFETY: loading a plugin runs the initializers of a library; the user who chooses the path trusts the file.
        let library = unsafe { libloading::Library::new(path) }.map_err(load_error)?;
        // SAFETY: the header declares this signature.
        let entry = unsafe { library.get::<unsafe extern "C" fn() -> *const sys::Api>(b"GetPjrtApi\0") };
        let entry = *entry.map_err(load_error)?;
        std::mem::forget(library);
        // SAFETY: the function takes nothing and returns a pointer to a constant table, or null.
        let api = unsafe { entry() };
        let (required_major, required_minor) = sys::MINIMUM_VERSION;
        // SAFETY: the pointer is null or valid for the life of the process; all versions begin with the fields
        // that are read here.
        let version = unsafe { api.as_ref().map(|api| (api.version.major, api.version.minor)) };
        let (major, minor) = version.unwrap_or((0, 0));
        if major != required_major || minor < required_minor {
            let path = path.to_owned();
            return Err(Error::ApiVersion { path, major, minor, required_major, required_minor });
        }
        // SAFETY: the version was checked, so the table has all the slots that `sys::Api` names.
        let api = unsafe { &*api };
        let plugin = Self { inner: Arc::new(Inner { path: path.to_owned(), api }) };
        // SAFETY: the call takes no arguments.
        unsafe { plugin.call(&mut sys::PluginInitialize::new()) }?;
        Ok(plugin)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The major and minor version of the API that the plugin was compiled with.
    pub fn api_version(&self) -> (i32, i32) {
        (self.inner.api.version.major, self.inner.api.version.minor)
    }

    /// For a CUDA plugin: the folder with the assembler and the device library that its compiler needs, if they are
    /// installed beside it. Pass it as the flag `xla_gpu_cuda_data_dir`.
    pub fn cuda_data_directory(&self) -> Option<PathBuf> {
        let nvidia = packages_of(self.path())?.join("nvidia");
        let folders = ["cu13", "cuda_nvcc"].map(|name| nvidia.join(name));
        folders.into_iter().find(|folder| folder.join("bin/ptxas").is_file())
    }

    /// The plugin's attributes, such as `stablehlo_current_version`.
    pub fn attributes(&self) -> Result<Vec<(String, NamedValue)>, Error> {
        let mut arguments = sys::PluginAttributes::new();
        // SAFETY: the call only writes to its own structure.
        unsafe { self.call(&mut arguments) }?;
        // SAFETY: the returned array has the given length and lives as long as the process.
        Ok(unsafe { named_values(arguments.attributes, arguments.num_attributes) })
    }

    /// Registers the kernels of `mt-kernels` with a CPU plugin, so that programs can call them.
    ///
    /// # Errors
    /// The plugin accepts no kernels, or refuses one.
    pub fn register_kernels(&self) -> Result<(), Error> {
        const CALL: &str = "RegisterHandler";
        const PLATFORM: &str = "HOST";
        // SAFETY: the pointer is null, or points to the structure that the kind names.
        let extension = unsafe { self.extension(sys::EXTENSION_FFI).cast::<sys::FfiExtension>().as_ref() };
        let Some(register) = extension.and_then(|extension| extension.register_handler) else {
            let message = "the plugin takes no kernels".to_owned();
            return Err(
                PjrtError { code: ErrorCode::Unimplemented, message, program: None, call: CALL }.into()
            );
        };
        for handler in mt_kernels::handlers() {
            let mut arguments = sys::RegisterHandler {
                struct_size: size_of::<sys::RegisterHandler>(),
                target_name: handler.kernel.name.as_ptr().cast(),
                target_name_size: handler.kernel.name.len(),
                handler: handler.address as *mut c_void,
                platform_name: PLATFORM.as_ptr().cast(),
                platform_name_size: PLATFORM.len(),
                traits: 0,
            };
            // SAFETY: the structure belongs to the function; names are copied, and handlers are functions.
            unsafe {
                let error = register((&raw mut arguments).cast());
                self.take_error(error, CALL)?;
            }
        }
        Ok(())
    }

    /// The functions of the plugin's profiler, if it has one.
    pub(crate) fn profiler(&self) -> Option<&'static sys::ProfilerApi> {
        let extension = self.extension(sys::EXTENSION_PROFILER).cast::<sys::ProfilerExtension>();
        // SAFETY: the pointer is null, or points to the structure that the kind names. Its table is null or lives as
        // long as the process.
        unsafe { extension.as_ref()?.api.as_ref() }
    }

    /// The extension of a kind; null if the plugin has none.
    fn extension(&self, kind: c_int) -> *mut sys::ExtensionBase {
        let mut extension = self.inner.api.extension_start.cast::<sys::ExtensionBase>();
        // SAFETY: extensions are a null-terminated list that lives as long as the process.
        while let Some(base) = unsafe { extension.as_ref() }
            && base.kind != kind
        {
            extension = base.next;
        }
        extension
    }

    /// Calls the function to which `arguments` belong.
    ///
    /// # Safety
    /// Every pointer in `arguments` meets the header's requirements.
    pub(crate) unsafe fn call<A: Arguments>(&self, arguments: &mut A) -> Result<(), Error> {
        let Some(function) = self.inner.api.functions[A::SLOT] else {
            let message = "the plugin does not have this function".to_owned();
            return Err(
                PjrtError { code: ErrorCode::Unimplemented, message, program: None, call: A::CALL }.into()
            );
        };
        // SAFETY: the structure is the function's own; the caller vouches for its contents.
        let error = unsafe { function((&raw mut *arguments).cast()) };
        // SAFETY: the error was just returned and has no other owner.
        unsafe { self.take_error(error, A::CALL) }
    }

    /// Turns a returned error into a value, and frees it.
    ///
    /// # Safety
    /// `error` is null or an error that belongs to the caller.
    pub(crate) unsafe fn take_error(&self, error: *mut sys::Error, call: &'static str) -> Result<(), Error> {
        if error.is_null() {
            return Ok(());
        }
        let mut message = sys::ErrorMessage::new();
        message.error = error;
        let mut code = sys::ErrorGetCode::new();
        code.error = error;
        let mut destroy = sys::ErrorDestroy::new();
        destroy.error = error;
        // SAFETY: the error is valid until it is destroyed at the end, after its message was copied. The functions
        // without a result are called through a type that returns a pointer, which is ignored.
        let (message, code) = unsafe {
            self.call_plain(&mut message);
            let text = text(message.message, message.message_size);
            self.call_plain(&mut code);
            self.call_plain(&mut destroy);
            (text, ErrorCode::from_raw(code.code))
        };
        Err(PjrtError { code, message, program: None, call }.into())
    }

    /// Calls a function that cannot fail, or whose failure does not matter, such as a destructor.
    ///
    /// # Safety
    /// As for [`Self::call`].
    pub(crate) unsafe fn call_plain<A: Arguments>(&self, arguments: &mut A) {
        if let Some(function) = self.inner.api.functions[A::SLOT] {
            // SAFETY: the structure is the function's own; the caller vouches for its contents.
            unsafe { function((&raw mut *arguments).cast::<c_void>()) };
        }
    }
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Plugin({})", self.inner.path.display())
    }
}

/// A named value of a plugin, or an option for its client.
#[derive(Clone, Debug, PartialEq)]
pub enum NamedValue {
    String(String),
    Integer(i64),
    Integers(Vec<i64>),
    Float(f32),
    Boolean(bool),
}

impl NamedValue {
    /// The value in the form of the C API. It points into `self` and `name`.
    pub(crate) fn to_raw(&self, name: &str) -> sys::NamedValue {
        let (kind, contents, value_size) = match self {
            Self::String(value) => {
                (sys::NAMED_STRING, sys::NamedValueContents { string: value.as_ptr().cast() }, value.len())
            }
            Self::Integer(value) => (sys::NAMED_INTEGER, sys::NamedValueContents { integer: *value }, 1),
            Self::Integers(value) => {
                (sys::NAMED_INTEGERS, sys::NamedValueContents { integers: value.as_ptr() }, value.len())
            }
            Self::Float(value) => (sys::NAMED_FLOAT, sys::NamedValueContents { float: *value }, 1),
            Self::Boolean(value) => (sys::NAMED_BOOLEAN, sys::NamedValueContents { boolean: *value }, 1),
        };
        sys::NamedValue {
            struct_size: size_of::<sys::NamedValue>(),
            extension_start: std::ptr::null_mut(),
            name: name.as_ptr().cast(),
            name_size: name.len(),
            kind,
            contents,
            value_size,
        }
    }
}

/// Copies an array of named values; skips entries of unknown kinds.
///
/// # Safety
/// `values` points to `count` valid entries, or `count` is 0.
pub(crate) unsafe fn named_values(values: *const sys::NamedValue, count: usize) -> Vec<(String, NamedValue)> {
    // SAFETY: the caller vouches for the array.
    let values = unsafe { array(values, count) };
    let convert = |value: &sys::NamedValue| {
        // SAFETY: the kind says which member of the union is set; strings and lists have the given size.
        let contents = unsafe {
            match value.kind {
                sys::NAMED_STRING => NamedValue::String(text(value.contents.string, value.value_size)),
                sys::NAMED_INTEGER => NamedValue::Integer(value.contents.integer),
                sys::NAMED_INTEGERS => {
                    NamedValue::Integers(array(value.contents.integers, value.value_size).to_vec())
                }
                sys::NAMED_FLOAT => NamedValue::Float(value.contents.float),
                sys::NAMED_BOOLEAN => NamedValue::Boolean(value.contents.boolean),
                _ => return None,
            }
        };
        // SAFETY: names have the given size.
        Some((unsafe { text(value.name, value.name_size) }, contents))
    };
    values.iter().filter_map(convert).collect()
}

/// Copies a string owned by the plugin.
///
/// # Safety
/// `data` points to `size` bytes, or `size` is 0.
pub(crate) unsafe fn text(data: *const c_char, size: usize) -> String {
    // SAFETY: the caller vouches for the array.
    String::from_utf8_lossy(unsafe { array(data.cast::<u8>(), size) }).into_owned()
}

/// An array owned by the plugin, which may be null when it is empty.
///
/// # Safety
/// `data` points to `count` valid values that outlive the result, or `count` is 0.
pub(crate) unsafe fn array<'a, T>(data: *const T, count: usize) -> &'a [T] {
    if count == 0 || data.is_null() {
        return &[];
    }
    // SAFETY: the caller vouches for the array.
    unsafe { slice::from_raw_parts(data, count) }
}
