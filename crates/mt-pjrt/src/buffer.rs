//! Arrays in the memory of a device.

use std::{
    ffi::c_void,
    fmt,
    ops::Range,
    ptr::{self, NonNull},
    sync::Arc,
};

use mt_shape::{DType, HostArray};

use crate::{
    Client, Error, Event,
    client::{Connection, non_null},
    memory::prefer_large_pages,
    plugin::array,
    sys,
};

/// An array in the memory of one device. Its contents never change. Dropping or donating it frees the array.
pub struct Buffer {
    raw: NonNull<sys::Buffer>,
    connection: Arc<Connection>,
    dtype: DType,
    dims: Vec<usize>,
    device: usize,
    /// The program that computes the buffer, for errors that appear only when the contents are needed.
    program: Option<Arc<str>>,
}

// SAFETY: PJRT buffers may be used from any thread.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Copies `bytes`, the row-major little-endian contents, to the client's device at index `device`. The caller may
    /// reuse the bytes as soon as this returns.
    ///
    /// # Errors
    /// The number of bytes does not match the type and dimensions, or the device's memory is full.
    pub fn from_bytes(
        client: &Client,
        device: usize,
        dtype: DType,
        dims: &[usize],
        bytes: &[u8],
    ) -> Result<Self, Error> {
        let expected = dims.iter().product::<usize>() * dtype.byte_size();
        if bytes.len() != expected {
            let actual = bytes.len();
            return Err(Error::Argument(format!(
                "{actual} bytes given for `{dtype}{dims:?}`, which takes {expected}"
            )));
        }
        let semantics = sys::IMMUTABLE_ONLY_DURING_CALL;
        // SAFETY: the bytes are valid during the call, as these semantics require.
        let (buffer, _done) =
            unsafe { Self::transfer(client, device, dtype, dims, bytes.as_ptr(), semantics) }?;
        Ok(buffer)
    }

    /// Passes an array to a device. On a CPU the buffer is the array's own memory; elsewhere the array is copied in the
    /// background. Either way the array is kept alive as long as needed, and never written.
    ///
    /// # Errors
    /// The device's memory is full.
    pub fn from_host(client: &Client, device: usize, host: Arc<HostArray>) -> Result<Self, Error> {
        let (dims, range) = (host.dims().to_vec(), 0..host.bytes().len());
        Self::from_host_slice(client, device, host, &dims, range)
    }

    /// As [`Self::from_host`], for a shard whose bytes are contiguous at `range` and that has its own dimensions. A
    /// shard that does not start at a multiple of 64 bytes, the alignment that platforms require, is copied on every
    /// platform.
    ///
    /// # Errors
    /// The range is outside of the array or does not match the dimensions, or the device's memory is full.
    pub fn from_host_slice(
        client: &Client,
        device: usize,
        host: Arc<HostArray>,
        dims: &[usize],
        range: Range<usize>,
    ) -> Result<Self, Error> {
        let dtype = host.dtype();
        let expected = dims.iter().product::<usize>() * dtype.byte_size();
        let Some(bytes) = host.bytes().get(range.clone()).filter(|bytes| bytes.len() == expected) else {
            let size = host.bytes().len();
            return Err(Error::Argument(format!(
                "bytes {range:?} of {size} given for `{dtype}{dims:?}`, which takes {expected}"
            )));
        };
        if !bytes.as_ptr().addr().is_multiple_of(ALIGNMENT) {
            return Self::from_bytes(client, device, dtype, dims, bytes);
        }
        let semantics = if client.platform_name() == "cpu" {
            sys::IMMUTABLE_ZERO_COPY
        } else {
            sys::IMMUTABLE_UNTIL_TRANSFER_COMPLETES
        };
        let data = bytes.as_ptr();
        // SAFETY: the array is kept until the event signals that it is no longer needed, and nobody changes it, because
        // it is shared. PJRT returns an event with every buffer.
        let (buffer, done) = unsafe { Self::transfer(client, device, dtype, dims, data, semantics) }?;
        if let Some(done) = done {
            done.keep_until_ready(host)?;
        }
        Ok(buffer)
    }

    /// An array of zeros. On a CPU the system provides its memory when it is first used, piece by piece, so that large
    /// arrays are made at once. A donated array is updated in place.
    ///
    /// # Errors
    /// The device's memory is full.
    pub fn zeros(client: &Client, device: usize, dtype: DType, dims: &[usize]) -> Result<Self, Error> {
        let mut host = HostArray::zeros(dtype, dims);
        let bytes = host.bytes_mut();
        if client.platform_name() != "cpu" || bytes.is_empty() {
            return Self::from_bytes(client, device, dtype, dims, bytes);
        }
        prefer_large_pages(bytes);
        let data = bytes.as_mut_ptr();
        // SAFETY: the array is kept until the event signals that it is no longer needed, and only the plugin has it until
        // then.
        let (buffer, done) =
            unsafe { Self::transfer(client, device, dtype, dims, data, sys::MUTABLE_ZERO_COPY) }?;
        if let Some(done) = done {
            done.keep_until_ready(host)?;
        }
        Ok(buffer)
    }

    /// # Safety
    /// `data` points to the contents of an array of the given type, and stays valid as long as `semantics` require.
    unsafe fn transfer(
        client: &Client,
        device: usize,
        dtype: DType,
        dims: &[usize],
        data: *const u8,
        semantics: i32,
    ) -> Result<(Self, Option<Event>), Error> {
        let raw_dims: Vec<i64> = dims.iter().map(|size| *size as i64).collect();
        let mut arguments = sys::ClientBufferFromHostBuffer::new();
        arguments.client = client.connection.raw.as_ptr();
        arguments.data = data.cast();
        arguments.element_type = to_raw(dtype);
        arguments.dims = raw_dims.as_ptr();
        arguments.num_dims = raw_dims.len();
        arguments.host_buffer_semantics = semantics;
        arguments.device = client.raw_device(device)?.raw.as_ptr();
        // SAFETY: the client and the device are valid, the dimensions outlive the call, and the caller vouches for
        // the data.
        unsafe { client.connection.plugin.call(&mut arguments) }?;
        // SAFETY: the event and the buffer were just created for this call.
        let done = unsafe { Event::from_raw(arguments.done_with_host_buffer, &client.connection) };
        let raw = non_null(arguments.buffer, "ClientBufferFromHostBuffer")?;
        let connection = client.connection.clone();
        Ok((Self { raw, connection, dtype, dims: dims.to_vec(), device, program: None }, done))
    }

    /// Takes over an output of `program`.
    ///
    /// # Safety
    /// `raw` is a buffer of this client that belongs to the caller.
    pub(crate) unsafe fn from_raw(
        raw: NonNull<sys::Buffer>,
        connection: &Arc<Connection>,
        device: usize,
        program: Option<Arc<str>>,
    ) -> Result<Self, Error> {
        let connection = connection.clone();
        let mut buffer = Self { raw, connection, dtype: DType::F32, dims: Vec::new(), device, program };
        let mut element_type = sys::BufferElementType::new();
        element_type.buffer = raw.as_ptr();
        let mut dims = sys::BufferDimensions::new();
        dims.buffer = raw.as_ptr();
        // SAFETY: the buffer is valid, and its dimensions live as long as it does.
        let dims = unsafe {
            buffer.connection.plugin.call(&mut element_type)?;
            buffer.connection.plugin.call(&mut dims)?;
            array(dims.dims, dims.num_dims)
        };
        buffer.dims = dims.iter().map(|size| *size as usize).collect();
        buffer.dtype = from_raw(element_type.element_type)?;
        Ok(buffer)
    }

    pub(crate) fn raw(&self) -> *mut sys::Buffer {
        self.raw.as_ptr()
    }

    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The index of the device among its client's.
    pub fn device(&self) -> usize {
        self.device
    }

    /// The bytes that the buffer takes in the device's memory.
    pub fn size_on_device(&self) -> Result<usize, Error> {
        let mut arguments = sys::BufferOnDeviceSizeInBytes::new();
        arguments.buffer = self.raw();
        // SAFETY: the buffer is valid.
        unsafe { self.connection.plugin.call(&mut arguments) }.map_err(|error| self.name_program(error))?;
        Ok(arguments.size)
    }

    /// The event that fires when the contents exist.
    pub fn ready(&self) -> Result<Option<Event>, Error> {
        let mut arguments = sys::BufferReadyEvent::new();
        arguments.buffer = self.raw();
        // SAFETY: the buffer is valid; the event belongs to the caller.
        unsafe {
            self.connection.plugin.call(&mut arguments).map_err(|error| self.name_program(error))?;
            Ok(Event::from_raw(arguments.event, &self.connection))
        }
    }

    /// Waits until the contents exist.
    ///
    /// # Errors
    /// The program that computes the contents failed.
    pub fn wait(&self) -> Result<(), Error> {
        match self.ready()? {
            Some(event) => event.wait().map_err(|error| self.name_program(error)),
            None => Ok(()),
        }
    }

    /// Starts copying the contents to host memory. The buffer may be dropped or donated meanwhile.
    ///
    /// # Errors
    /// The copy cannot be started. The result's `wait` returns errors of the program that computes the contents.
    pub fn to_host_async(&self) -> Result<PendingHostArray, Error> {
        let mut host = HostArray::zeros(self.dtype, &self.dims);
        let minor_to_major: Vec<i64> = (0..self.dims.len() as i64).rev().collect();
        // Programs may return buffers in layouts that the compiler chose; host arrays are row-major.
        let mut layout = sys::MemoryLayout {
            struct_size: size_of::<sys::MemoryLayout>(),
            extension_start: ptr::null_mut(),
            tiled: sys::TiledLayout {
                struct_size: size_of::<sys::TiledLayout>(),
                extension_start: ptr::null_mut(),
                minor_to_major: minor_to_major.as_ptr(),
                minor_to_major_size: minor_to_major.len(),
                tile_dims: ptr::null(),
                tile_dim_sizes: ptr::null(),
                num_tiles: 0,
            },
            kind: sys::TILED,
        };
        let bytes = host.bytes_mut();
        let mut arguments = sys::BufferToHostBuffer::new();
        arguments.buffer = self.raw();
        arguments.host_layout = &raw mut layout;
        arguments.dst = bytes.as_mut_ptr().cast::<c_void>();
        arguments.dst_size = bytes.len();
        if bytes.is_empty() {
            return Ok(PendingHostArray {
                host: Some(host),
                event: self.ready()?,
                program: self.program.clone(),
            });
        }
        // SAFETY: the buffer is valid and the layout outlives the call. The destination has the size of the contents.
        // It is on the heap, so it does not move until the event is awaited, by `wait` or by dropping.
        let event = unsafe {
            self.connection.plugin.call(&mut arguments).map_err(|error| self.name_program(error))?;
            Event::from_raw(arguments.event, &self.connection)
        };
        Ok(PendingHostArray { host: Some(host), event, program: self.program.clone() })
    }

    /// The contents.
    ///
    /// # Errors
    /// The program that computes the contents failed.
    pub fn to_host(&self) -> Result<HostArray, Error> {
        self.to_host_async()?.wait()
    }

    /// Copies the contents to another memory of a device, such as `pinned_host`.
    ///
    /// # Errors
    /// The device has no such memory, or the memory is full.
    pub fn copy_to_memory(&self, device: usize, kind: &str) -> Result<Self, Error> {
        let client = Client { connection: self.connection.clone() };
        let device_memories = client.device(device)?.memories();
        let memory = client.raw_device(device)?.memory(kind).ok_or_else(|| {
            let kinds: Vec<String> = device_memories.into_iter().map(|memory| memory.kind).collect();
            Error::Argument(format!(
                "device {device} has no memory `{kind}`\nhint: it has `{}`",
                kinds.join("`, `")
            ))
        })?;
        let mut arguments = sys::BufferCopyToMemory::new();
        arguments.buffer = self.raw();
        arguments.dst_memory = memory.as_ptr();
        // SAFETY: the buffer and the memory are valid and of one client; the new buffer belongs to the caller.
        unsafe {
            self.connection.plugin.call(&mut arguments).map_err(|error| self.name_program(error))?;
            let raw = non_null(arguments.dst_buffer, "BufferCopyToMemory")?;
            Self::from_raw(raw, &self.connection, device, self.program.clone())
        }
    }

    fn name_program(&self, error: Error) -> Error {
        match &self.program {
            Some(program) => error.in_program(program),
            None => error,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut arguments = sys::BufferDestroy::new();
        arguments.buffer = self.raw();
        // SAFETY: the buffer is valid and is not used again. Work that still reads it holds its memory.
        unsafe { self.connection.plugin.call_plain(&mut arguments) };
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({}{:?}, device {})", self.dtype, self.dims, self.device)
    }
}

/// The contents of a buffer while they are copied to host memory.
#[must_use = "dropping it waits for the copy and discards it"]
pub struct PendingHostArray {
    /// Present until `wait` takes it.
    host: Option<HostArray>,
    event: Option<Event>,
    program: Option<Arc<str>>,
}

impl PendingHostArray {
    /// Whether [`Self::wait`] would return at once.
    pub fn is_ready(&self) -> Result<bool, Error> {
        self.event.as_ref().map_or(Ok(true), Event::is_ready)
    }

    /// Waits for the contents.
    ///
    /// # Errors
    /// The program that computes the contents failed.
    pub fn wait(mut self) -> Result<HostArray, Error> {
        if let Some(event) = &self.event {
            let result = event.wait();
            result.map_err(|error| match &self.program {
                Some(program) => error.in_program(program),
                None => error,
            })?;
        }
        self.event = None;
        Ok(self.host.take().expect("the array is taken only here"))
    }
}

impl Drop for PendingHostArray {
    fn drop(&mut self) {
        // The array must not be freed while the plugin writes to it. The error was already reported or is unwanted.
        if let Some(event) = self.event.take() {
            let _ = event.wait();
        }
    }
}

/// Alignment in bytes that platforms require of arrays in host memory.
const ALIGNMENT: usize = 64;

/// The number of an element type in the C API.
fn to_raw(dtype: DType) -> i32 {
    match dtype {
        DType::Bool => 1,
        DType::I8 => 2,
        DType::I16 => 3,
        DType::I32 => 4,
        DType::I64 => 5,
        DType::U8 => 6,
        DType::U16 => 7,
        DType::U32 => 8,
        DType::U64 => 9,
        DType::F16 => 10,
        DType::F32 => 11,
        DType::F64 => 12,
        DType::BF16 => 13,
        DType::F8E5M2 => 16,
        DType::F8E4M3FN => 17,
        DType::I4 => 20,
    }
}

fn from_raw(element_type: i32) -> Result<DType, Error> {
    DType::ALL
        .into_iter()
        .find(|dtype| to_raw(*dtype) == element_type)
        .ok_or_else(|| Error::Argument(format!("PJRT element type {element_type} is not supported")))
}
