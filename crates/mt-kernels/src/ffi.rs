//! Handlers of XLA's foreign function interface.
//!
//! The structures follow the interface's C header, version 0.2 (source: `xla/ffi/api/c_api.h` in XLA). A plugin calls a
//! handler with a call frame: once for metadata, when the handler is registered, and then for each execution, with
//! buffers and the attributes of the operation. Programs name a handler in `stablehlo.custom_call` with API version 4.

use std::{
    cell::Cell,
    ffi::{CString, c_char, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    slice,
    sync::Arc,
};

use half::bf16;
use mt_shape::kernels::KernelCall;

use crate::{
    Team,
    shared::{Shared, join, share},
};

/// The address of a handler. It takes a call frame, and returns null or an error.
pub type Address = unsafe extern "C" fn(*mut Frame) -> *mut Error;

/// A handler and the name by which programs call it.
#[derive(Clone, Copy)]
pub struct Handler {
    pub kernel: &'static KernelCall,
    pub address: Address,
}

/// The elements of a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Data<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    I32(&'a [i32]),
    U64(&'a [u64]),
}

/// The elements of a result.
#[derive(Debug)]
pub(crate) enum DataMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    I32(&'a mut [i32]),
}

/// One call: buffers, attributes, and threads.
pub(crate) struct Call<'a> {
    frame: &'a Frame,
    kernel: &'static KernelCall,
    /// A bit for each attribute that was read.
    read: Cell<u64>,
}

/// A defect of a call. Only a program that this workspace did not print can cause it.
pub(crate) type Fault = String;

impl<'a> Call<'a> {
    fn argument(&self, index: usize) -> Result<&'a Buffer, Fault> {
        let arguments = &self.frame.arguments;
        if index >= arguments.size as usize {
            return Err(format!("argument {index} is missing"));
        }
        // SAFETY: both arrays have `size` entries, and buffers are the only kind of argument in this version.
        Ok(unsafe { &*(*arguments.values.add(index)).cast::<Buffer>() })
    }

    fn result(&self, index: usize) -> Result<&'a Buffer, Fault> {
        let results = &self.frame.results;
        if index >= results.size as usize {
            return Err(format!("result {index} is missing"));
        }
        // SAFETY: as for arguments.
        Ok(unsafe { &*(*results.values.add(index)).cast::<Buffer>() })
    }

    /// The dimensions of an argument, which is dense and row-major.
    pub(crate) fn dims(&self, argument: usize) -> Result<Vec<usize>, Fault> {
        Ok(self.argument(argument)?.dims())
    }

    /// The number of results.
    pub(crate) fn num_results(&self) -> usize {
        self.frame.results.size as usize
    }

    /// The dimensions of a result.
    pub(crate) fn result_dims(&self, result: usize) -> Result<Vec<usize>, Fault> {
        Ok(self.result(result)?.dims())
    }

    /// The elements of an argument.
    pub(crate) fn data(&self, argument: usize) -> Result<Data<'a>, Fault> {
        let buffer = self.argument(argument)?;
        // SAFETY: XLA's buffers are aligned for their type, dense, filled, and alive during the call.
        unsafe {
            Ok(match buffer.dtype {
                F32 => Data::F32(buffer.elements()),
                BF16 => Data::Bf16(buffer.elements()),
                S32 => Data::I32(buffer.elements()),
                U64 => Data::U64(buffer.elements()),
                other => return Err(format!("argument {argument} has elements of type {other}")),
            })
        }
    }

    /// The elements of a result. Their initial content is arbitrary.
    ///
    /// # Safety
    /// Each result is taken once, and no argument shares its memory; it is written before it is read.
    pub(crate) unsafe fn data_mut(&self, result: usize) -> Result<DataMut<'a>, Fault> {
        let buffer = self.result(result)?;
        // SAFETY: XLA's buffers are aligned for their type, dense, and alive during the call, and any bits are a
        // number. The caller promises the rest.
        unsafe {
            Ok(match buffer.dtype {
                F32 => DataMut::F32(buffer.elements_mut()),
                BF16 => DataMut::Bf16(buffer.elements_mut()),
                S32 => DataMut::I32(buffer.elements_mut()),
                other => return Err(format!("result {result} has elements of type {other}")),
            })
        }
    }

    /// The elements of a result that shares the memory, and so the initial content, of the argument with the same
    /// index.
    ///
    /// # Safety
    /// Each result is taken once, and the argument is not read otherwise.
    pub(crate) unsafe fn updated(&self, index: usize) -> Result<DataMut<'a>, Fault> {
        let (argument, result) = (self.argument(index)?, self.result(index)?);
        if argument.data != result.data || argument.dtype != result.dtype || argument.dims() != result.dims()
        {
            return Err(format!("result {index} does not share the memory of argument {index}"));
        }
        // SAFETY: what the caller promises; the contents are the argument's.
        unsafe { self.data_mut(index) }
    }

    /// An attribute that is a list of integers.
    pub(crate) fn integers(&self, name: &str) -> Result<&'a [i64], Fault> {
        let (kind, value) = self.attribute(name)?;
        // SAFETY: the kind states the type of the value.
        let array = (kind == ATTRIBUTE_ARRAY).then(|| unsafe { &*value.cast::<Array>() });
        match array {
            // SAFETY: an array of this type has `size` integers.
            Some(array) if array.dtype == S64 => Ok(unsafe { slice_of(array.data.cast(), array.size) }),
            _ => Err(format!("the attribute `{name}` is not a list of integers")),
        }
    }

    /// An attribute that is an integer.
    pub(crate) fn integer(&self, name: &str) -> Result<i64, Fault> {
        let (kind, value) = self.attribute(name)?;
        // SAFETY: the kind states the type of the value.
        let scalar = (kind == ATTRIBUTE_SCALAR).then(|| unsafe { &*value.cast::<Scalar>() });
        match scalar {
            // SAFETY: a scalar of this type is one integer.
            Some(scalar) if scalar.dtype == S64 => Ok(unsafe { *scalar.value.cast::<i64>() }),
            _ => Err(format!("the attribute `{name}` is not an integer")),
        }
    }

    /// An attribute that is an integer, or `None` if it is missing.
    pub(crate) fn integer_if_given(&self, name: &str) -> Result<Option<i64>, Fault> {
        self.find_attribute(name).map(|_| self.integer(name)).transpose()
    }

    /// In debug builds, refuses attributes that the handler did not read.
    fn check_read(&self) -> Result<(), Fault> {
        let given = self.frame.attributes.size as u32;
        if cfg!(debug_assertions) && self.read.get().count_ones() != given {
            let read = self.read.get().count_ones();
            return Err(format!("`{}` reads {read} of {given} attributes", self.kernel.name));
        }
        Ok(())
    }

    fn attribute(&self, name: &str) -> Result<(c_int, *const c_void), Fault> {
        self.find_attribute(name).ok_or_else(|| format!("the attribute `{name}` is missing"))
    }

    fn find_attribute(&self, name: &str) -> Option<(c_int, *const c_void)> {
        let attributes = &self.frame.attributes;
        let size = attributes.size as usize;
        // SAFETY: the three arrays have `size` entries.
        let (kinds, names, values) = unsafe {
            (
                slice_of(attributes.kinds, size),
                slice_of(attributes.names, size),
                slice_of(attributes.values, size),
            )
        };
        // SAFETY: each pointer refers to a span of `length` bytes.
        let text = |span: &*const ByteSpan| unsafe { slice_of((**span).start, (**span).length) };
        debug_assert!(self.kernel.has_attribute(name), "`{}` declares no `{name}`", self.kernel.name);
        let index = names.iter().position(|span| text(span) == name.as_bytes())?;
        self.read.set(self.read.get() | 1 << index);
        Some((kinds[index], values[index]))
    }

    /// The threads with which XLA runs the program, including the calling one.
    pub(crate) fn team(&self) -> XlaThreads<'a> {
        let num_threads = self.frame.num_threads().unwrap_or(1).max(1);
        XlaThreads { frame: self.frame, num_threads }
    }
}

/// Answers a call of a kernel: fills in metadata itself, or executes `body`. Panics become errors.
///
/// # Safety
/// `frame` is a call frame of XLA.
pub(crate) unsafe fn answer(
    frame: *mut Frame,
    kernel: &'static KernelCall,
    body: impl FnOnce(&Call<'_>) -> Result<(), Fault>,
) -> *mut Error {
    // SAFETY: what the caller promises.
    let frame = unsafe { &*frame };
    if frame.describe() || frame.stage != STAGE_EXECUTE {
        return std::ptr::null_mut();
    }
    let result = catch_unwind(AssertUnwindSafe(|| {
        let call = Call { frame, kernel, read: Cell::new(0) };
        body(&call)?;
        call.check_read()
    }));
    match result {
        Ok(Ok(())) => std::ptr::null_mut(),
        Ok(Err(fault)) => frame.error(&fault),
        Err(_) => frame.error("a kernel panicked"),
    }
}

/// XLA's threads. Threads that are busy with other operations at the time of a call may never join it.
pub(crate) struct XlaThreads<'a> {
    frame: &'a Frame,
    num_threads: usize,
}

// SAFETY: other threads use the frame only to schedule tasks, which XLA allows from any thread, and nothing changes the
// frame.
unsafe impl Sync for XlaThreads<'_> {}

impl Team for XlaThreads<'_> {
    fn num_threads(&self) -> usize {
        self.num_threads
    }

    fn for_each(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        let others = self.num_threads.min(count).saturating_sub(1);
        if others == 0 {
            return (0..count).for_each(task);
        }
        share(others, count, task, &|tasks| self.frame.schedule(tasks));
    }
}

const F32: c_int = 11;
const BF16: c_int = 16;
const S32: c_int = 4;
const S64: c_int = 5;
const U64: c_int = 9;
const ATTRIBUTE_ARRAY: c_int = 1;
const ATTRIBUTE_SCALAR: c_int = 3;
const STAGE_EXECUTE: c_int = 3;
const EXTENSION_METADATA: c_int = 1;
const ERROR_INTERNAL: c_int = 13;

/// XLA's error type.
#[repr(C)]
pub struct Error {
    _private: [u8; 0],
}

#[repr(C)]
struct Context {
    _private: [u8; 0],
}

/// `XLA_FFI_CallFrame`
#[repr(C)]
pub struct Frame {
    struct_size: usize,
    extension: *mut Extension,
    api: *const Api,
    context: *mut Context,
    stage: c_int,
    arguments: Buffers,
    results: Buffers,
    attributes: Attributes,
}

#[repr(C)]
struct Extension {
    struct_size: usize,
    kind: c_int,
    next: *mut Extension,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

#[repr(C)]
struct Metadata {
    struct_size: usize,
    version: Version,
    // The fields after these concern handlers with traits and state.
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    struct_size: usize,
    extension: *mut Extension,
    major: c_int,
    minor: c_int,
}

/// `XLA_FFI_Args` and `XLA_FFI_Rets`
#[repr(C)]
struct Buffers {
    struct_size: usize,
    extension: *mut Extension,
    size: i64,
    kinds: *const c_int,
    values: *const *mut c_void,
}

#[repr(C)]
struct Attributes {
    struct_size: usize,
    extension: *mut Extension,
    size: i64,
    kinds: *const c_int,
    names: *const *const ByteSpan,
    values: *const *const c_void,
}

#[repr(C)]
struct ByteSpan {
    start: *const u8,
    length: usize,
}

#[repr(C)]
struct Scalar {
    dtype: c_int,
    value: *const c_void,
}

#[repr(C)]
struct Array {
    dtype: c_int,
    size: usize,
    data: *const c_void,
}

#[repr(C)]
struct Buffer {
    struct_size: usize,
    extension: *mut Extension,
    dtype: c_int,
    data: *mut c_void,
    rank: i64,
    dims: *const i64,
}

type Function = unsafe extern "C" fn(*mut c_void) -> *mut Error;

/// `XLA_FFI_Api`, up to the last field that is used.
#[repr(C)]
struct Api {
    struct_size: usize,
    extension: *mut Extension,
    version: Version,
    internal: *const c_void,
    error_create: Function,
    unused: [Option<Function>; 10],
    thread_pool_schedule: Option<Function>,
    thread_pool_num_threads: Option<Function>,
}

#[repr(C)]
struct ErrorCreate {
    struct_size: usize,
    extension: *mut Extension,
    message: *const c_char,
    code: c_int,
}

#[repr(C)]
struct Schedule {
    struct_size: usize,
    extension: *mut Extension,
    context: *mut Context,
    task: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
}

#[repr(C)]
struct NumThreads {
    struct_size: usize,
    extension: *mut Extension,
    context: *mut Context,
    num_threads: *mut i64,
}

impl Frame {
    /// Fills in metadata if the call requests it, and returns whether it does.
    fn describe(&self) -> bool {
        let mut extension = self.extension;
        // SAFETY: extensions form a list that ends with null, and the kind states the type of each.
        unsafe {
            while let Some(current) = extension.as_ref() {
                if current.kind == EXTENSION_METADATA {
                    let metadata = &mut *(*extension.cast::<MetadataExtension>()).metadata;
                    // The plugin accepts only its own version as an answer.
                    metadata.version.major = (*self.api).version.major;
                    metadata.version.minor = (*self.api).version.minor;
                    return true;
                }
                extension = current.next;
            }
        }
        false
    }

    fn error(&self, message: &str) -> *mut Error {
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        let mut arguments = ErrorCreate {
            struct_size: size_of::<ErrorCreate>(),
            extension: std::ptr::null_mut(),
            message: message.as_ptr(),
            code: ERROR_INTERNAL,
        };
        // SAFETY: the function takes this structure and copies the message.
        unsafe { ((*self.api).error_create)((&raw mut arguments).cast()) }
    }

    fn num_threads(&self) -> Option<usize> {
        let mut count = 0_i64;
        let mut arguments = NumThreads {
            struct_size: size_of::<NumThreads>(),
            extension: std::ptr::null_mut(),
            context: self.context,
            num_threads: &raw mut count,
        };
        // SAFETY: the function takes this structure, and returns an error or null.
        let error = unsafe { ((*self.api).thread_pool_num_threads?)((&raw mut arguments).cast()) };
        (error.is_null() && count > 0).then_some(count as usize)
    }

    /// Schedules `join` with these tasks on another thread, unless XLA refuses.
    fn schedule(&self, tasks: Arc<Shared>) {
        let data = Arc::into_raw(tasks).cast_mut().cast();
        let mut arguments = Schedule {
            struct_size: size_of::<Schedule>(),
            extension: std::ptr::null_mut(),
            context: self.context,
            task: join,
            data,
        };
        // SAFETY: the function takes this structure. If XLA refuses the task, it does not run it, and the reference
        // still belongs to this function.
        unsafe {
            let refused = match (*self.api).thread_pool_schedule {
                Some(schedule) => !schedule((&raw mut arguments).cast()).is_null(),
                None => true,
            };
            if refused {
                drop(Arc::from_raw(data.cast_const().cast::<Shared>()));
            }
        }
    }
}

impl Buffer {
    fn dims(&self) -> Vec<usize> {
        // SAFETY: the array has `rank` dimensions.
        let dims = unsafe { slice_of(self.dims, self.rank as usize) };
        dims.iter().map(|dim| *dim as usize).collect()
    }

    fn num_elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// # Safety
    /// The buffer has elements of this type, and nothing writes to it during `'a`.
    unsafe fn elements<'a, T>(&self) -> &'a [T] {
        // SAFETY: what the caller promises.
        unsafe { slice_of(self.data.cast_const().cast(), self.num_elements()) }
    }

    /// # Safety
    /// The buffer has elements of this type, and nothing else reads or writes it during `'a`.
    unsafe fn elements_mut<'a, T>(&self) -> &'a mut [T] {
        let count = self.num_elements();
        if count == 0 {
            return &mut [];
        }
        // SAFETY: what the caller promises.
        unsafe { slice::from_raw_parts_mut(self.data.cast(), count) }
    }
}

/// A slice of a C array, which may be null if it is empty.
///
/// # Safety
/// `data` points to `count` values that outlive the result, or `count` is 0.
unsafe fn slice_of<'a, T>(data: *const T, count: usize) -> &'a [T] {
    if count == 0 || data.is_null() {
        return &[];
    }
    // SAFETY: what the caller promises.
    unsafe { slice::from_raw_parts(data, count) }
}
