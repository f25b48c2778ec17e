//! Kernels as handlers of XLA's foreign function interface.
//!
//! The structures are written after the header of that interface, version 0.2. A plugin calls a handler with a frame that
//! says what it is called for: for metadata when it is registered, and then for each execution, with buffers and the
//! attributes of the operation. Programs name a handler in `stablehlo.custom_call`, with API version 4.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    slice,
    sync::Arc,
};

use half::bf16;

use crate::{
    Team,
    shared::{Shared, join, share},
};

/// The address of a handler. It takes a call frame, and returns null or an error.
pub type Address = unsafe extern "C" fn(*mut Frame) -> *mut Error;

/// A handler and the name that programs call it by.
#[derive(Clone, Copy)]
pub struct Handler {
    pub name: &'static str,
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
}

/// What is wrong with a call. Only a program that this workspace did not print can cause it.
pub(crate) type Fault = String;

impl<'a> Call<'a> {
    fn argument(&self, index: usize) -> Result<&'a Buffer, Fault> {
        let arguments = &self.frame.arguments;
        if index >= arguments.size as usize {
            return Err(format!("there is no argument {index}"));
        }
        // SAFETY: both arrays have `size` entries, and buffers are the only kind of argument that there is.
        Ok(unsafe { &*(*arguments.values.add(index)).cast::<Buffer>() })
    }

    fn result(&self, index: usize) -> Result<&'a Buffer, Fault> {
        let results = &self.frame.results;
        if index >= results.size as usize {
            return Err(format!("there is no result {index}"));
        }
        // SAFETY: as for arguments.
        Ok(unsafe { &*(*results.values.add(index)).cast::<Buffer>() })
    }

    /// The dimensions of an argument, which is dense and row-major.
    pub(crate) fn dims(&self, argument: usize) -> Result<Vec<usize>, Fault> {
        Ok(self.argument(argument)?.dims())
    }

    /// How many results there are.
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

    /// The elements of a result, whose contents are arbitrary.
    ///
    /// # Safety
    /// Each result is taken once, and no argument shares its memory; it is written before it is read.
    pub(crate) unsafe fn data_mut(&self, result: usize) -> Result<DataMut<'a>, Fault> {
        let buffer = self.result(result)?;
        // SAFETY: XLA's buffers are aligned for their type, dense, and alive during the call; any bits are a number. The
        // caller vouches for the rest.
        unsafe {
            Ok(match buffer.dtype {
                F32 => DataMut::F32(buffer.elements_mut()),
                BF16 => DataMut::Bf16(buffer.elements_mut()),
                S32 => DataMut::I32(buffer.elements_mut()),
                other => return Err(format!("result {result} has elements of type {other}")),
            })
        }
    }

    /// The elements of a result that has the memory, and the contents, of the argument of the same index.
    ///
    /// # Safety
    /// It is taken once, and the argument is not read otherwise.
    pub(crate) unsafe fn updated(&self, index: usize) -> Result<DataMut<'a>, Fault> {
        let (argument, result) = (self.argument(index)?, self.result(index)?);
        if argument.data != result.data || argument.dtype != result.dtype || argument.dims() != result.dims()
        {
            return Err(format!("result {index} has other memory than its argument"));
        }
        // SAFETY: what the caller promises; the contents are the argument's.
        unsafe { self.data_mut(index) }
    }

    /// An attribute that is a list of integers.
    pub(crate) fn integers(&self, name: &str) -> Result<&'a [i64], Fault> {
        let (kind, value) = self.attribute(name)?;
        // SAFETY: the kind says what the value is.
        let array = (kind == ATTRIBUTE_ARRAY).then(|| unsafe { &*value.cast::<Array>() });
        match array {
            // SAFETY: an array of this type has `size` integers.
            Some(array) if array.dtype == S64 => Ok(unsafe { slice_of(array.data.cast(), array.size) }),
            _ => Err(format!("the attribute `{name}` is no list of integers")),
        }
    }

    /// An attribute that is an integer.
    pub(crate) fn integer(&self, name: &str) -> Result<i64, Fault> {
        let (kind, value) = self.attribute(name)?;
        // SAFETY: the kind says what the value is.
        let scalar = (kind == ATTRIBUTE_SCALAR).then(|| unsafe { &*value.cast::<Scalar>() });
        match scalar {
            // SAFETY: a scalar of this type is one integer.
            Some(scalar) if scalar.dtype == S64 => Ok(unsafe { *scalar.value.cast::<i64>() }),
            _ => Err(format!("the attribute `{name}` is no integer")),
        }
    }

    /// An attribute that is an integer and may be missing.
    pub(crate) fn integer_if_given(&self, name: &str) -> Result<Option<i64>, Fault> {
        self.find_attribute(name).map(|_| self.integer(name)).transpose()
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
        // SAFETY: the pointers are to spans, each of `length` bytes.
        let text = |span: &*const ByteSpan| unsafe { slice_of((**span).start, (**span).length) };
        let index = names.iter().position(|span| text(span) == name.as_bytes())?;
        Some((kinds[index], values[index]))
    }

    /// The threads that XLA runs the program with, one of which makes this call.
    pub(crate) fn team(&self) -> XlaThreads<'a> {
        let num_threads = self.frame.num_threads().unwrap_or(1).max(1);
        XlaThreads { frame: self.frame, num_threads }
    }
}

/// Answers a call: metadata by itself, an execution by `kernel`. Panics become errors.
///
/// # Safety
/// `frame` is a call frame of XLA's.
pub(crate) unsafe fn answer(
    frame: *mut Frame,
    kernel: impl FnOnce(&Call<'_>) -> Result<(), Fault>,
) -> *mut Error {
    // SAFETY: the caller vouches for the frame.
    let frame = unsafe { &*frame };
    if frame.describe() || frame.stage != STAGE_EXECUTE {
        return std::ptr::null_mut();
    }
    let result = catch_unwind(AssertUnwindSafe(|| kernel(&Call { frame })));
    match result {
        Ok(Ok(())) => std::ptr::null_mut(),
        Ok(Err(fault)) => frame.error(&fault),
        Err(_) => frame.error("a kernel panicked"),
    }
}

/// XLA's threads. Those that are busy with other operations when a call is made may never join it.
pub(crate) struct XlaThreads<'a> {
    frame: &'a Frame,
    num_threads: usize,
}

// SAFETY: other threads reach the frame only to schedule tasks, which XLA allows from any thread; it does not change.
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

/// An error of XLA's.
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
    // What follows is for handlers with traits and state.
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

/// `XLA_FFI_Api`, up to what is used.
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
    /// Answers a question for metadata, if that is what the call is for.
    fn describe(&self) -> bool {
        let mut extension = self.extension;
        // SAFETY: extensions are a list that ends with null, and the kind says what one is.
        unsafe {
            while let Some(current) = extension.as_ref() {
                if current.kind == EXTENSION_METADATA {
                    let metadata = &mut *(*extension.cast::<MetadataExtension>()).metadata;
                    // Another version than the caller's own is taken for no answer.
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
        // SAFETY: the function takes this structure, and an error is the only thing that it returns.
        let error = unsafe { ((*self.api).thread_pool_num_threads?)((&raw mut arguments).cast()) };
        (error.is_null() && count > 0).then_some(count as usize)
    }

    /// Has a thread join in, unless there is none.
    fn schedule(&self, tasks: Arc<Shared>) {
        let data = Arc::into_raw(tasks).cast_mut().cast();
        let mut arguments = Schedule {
            struct_size: size_of::<Schedule>(),
            extension: std::ptr::null_mut(),
            context: self.context,
            task: join,
            data,
        };
        // SAFETY: the function takes this structure. A task that was refused has not been run, and what it would have been
        // given is still ours.
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
        // SAFETY: there are as many dimensions as the rank says.
        let dims = unsafe { slice_of(self.dims, self.rank as usize) };
        dims.iter().map(|dim| *dim as usize).collect()
    }

    fn num_elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// # Safety
    /// The buffer has elements of this type, and nothing writes to it during `'a`.
    unsafe fn elements<'a, T>(&self) -> &'a [T] {
        // SAFETY: the caller vouches for it.
        unsafe { slice_of(self.data.cast_const().cast(), self.num_elements()) }
    }

    /// # Safety
    /// The buffer has elements of this type, and nothing else reads or writes it during `'a`.
    unsafe fn elements_mut<'a, T>(&self) -> &'a mut [T] {
        let count = self.num_elements();
        if count == 0 {
            return &mut [];
        }
        // SAFETY: the caller vouches for it.
        unsafe { slice::from_raw_parts_mut(self.data.cast(), count) }
    }
}

/// An array, which may be null when it is empty.
///
/// # Safety
/// `data` points to `count` values that outlive the result, or `count` is 0.
unsafe fn slice_of<'a, T>(data: *const T, count: usize) -> &'a [T] {
    if count == 0 || data.is_null() {
        return &[];
    }
    // SAFETY: the caller vouches for it.
    unsafe { slice::from_raw_parts(data, count) }
}
