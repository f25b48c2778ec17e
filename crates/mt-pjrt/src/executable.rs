//! Compiled programs.

use std::{fmt, ptr::NonNull, sync::Arc};

use crate::{
    Buffer, Client, CompileOptions, Error, Event, NamedValue,
    client::{Connection, non_null},
    plugin::{array, named_values},
    sys,
};

/// A compiled program, loaded on its devices. Clones share it.
#[derive(Clone)]
pub struct Executable {
    inner: Arc<Inner>,
}

struct Inner {
    connection: Arc<Connection>,
    loaded: NonNull<sys::LoadedExecutable>,
    executable: NonNull<sys::Executable>,
    name: Arc<str>,
    num_outputs: usize,
    /// Indices among the client's devices, in the order of the program's mesh.
    devices: Vec<usize>,
}

// SAFETY: PJRT executables may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// An argument of a program, on one device.
#[derive(Debug)]
pub enum Argument<'a> {
    /// The buffer stays as it is.
    Borrow(&'a Buffer),
    /// The program may reuse the buffer's memory for its results.
    Donate(Buffer),
}

impl Argument<'_> {
    fn buffer(&self) -> &Buffer {
        match self {
            Self::Borrow(buffer) => buffer,
            Self::Donate(buffer) => buffer,
        }
    }
}

/// A program that was started. The outputs can be used at once: what uses them waits.
#[derive(Debug)]
pub struct Execution {
    /// For each device, the results.
    pub outputs: Vec<Vec<Buffer>>,
    /// For each device, the event of the program's end.
    pub done: Vec<Event>,
}

/// What a program needs in the memory of each device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    pub code: u64,
    pub arguments: u64,
    pub outputs: u64,
    /// The part of the outputs that reuses donated arguments.
    pub aliased: u64,
    pub temporaries: u64,
    /// The same in the memory of the host, where values are offloaded to it.
    pub host_arguments: u64,
    pub host_outputs: u64,
    pub host_aliased: u64,
    pub host_temporaries: u64,
    /// The compiler's own account of the peak; 0 where it gives none.
    pub peak: u64,
}

impl Executable {
    pub(crate) fn compile(
        client: &Client,
        name: &str,
        stablehlo: &str,
        options: &CompileOptions,
    ) -> Result<Self, Error> {
        for device in &options.devices {
            client.raw_device(*device)?;
        }
        let device_ids: Vec<i64> = client.devices().iter().map(|device| i64::from(device.id())).collect();
        let encoded = options.encode(&device_ids);
        let mut program = sys::Program::new();
        // The plugin only reads the code, although the pointer is not to constant memory.
        program.code = stablehlo.as_ptr().cast_mut().cast();
        program.code_size = stablehlo.len();
        program.format = FORMAT.as_ptr().cast();
        program.format_size = FORMAT.len();
        let mut arguments = sys::ClientCompile::new();
        arguments.client = client.connection.raw.as_ptr();
        arguments.program = &raw const program;
        arguments.compile_options = encoded.as_ptr().cast();
        arguments.compile_options_size = encoded.len();
        // SAFETY: the client is valid; the program and the options outlive the call.
        unsafe { client.connection.plugin.call(&mut arguments) }.map_err(|error| error.in_program(name))?;
        Self::from_raw(client, name, non_null(arguments.executable, "ClientCompile")?)
    }

    pub(crate) fn deserialize(client: &Client, name: &str, serialized: &[u8]) -> Result<Self, Error> {
        let mut arguments = sys::ExecutableDeserializeAndLoad::new();
        arguments.client = client.connection.raw.as_ptr();
        arguments.serialized_executable = serialized.as_ptr().cast();
        arguments.serialized_executable_size = serialized.len();
        // SAFETY: the client is valid and the bytes outlive the call.
        unsafe { client.connection.plugin.call(&mut arguments) }.map_err(|error| error.in_program(name))?;
        Self::from_raw(client, name, non_null(arguments.loaded_executable, "ExecutableDeserializeAndLoad")?)
    }

    fn from_raw(client: &Client, name: &str, loaded: NonNull<sys::LoadedExecutable>) -> Result<Self, Error> {
        let connection = &client.connection;
        let guard = Loaded { connection, raw: loaded };
        let mut get = sys::LoadedExecutableGetExecutable::new();
        get.loaded_executable = loaded.as_ptr();
        // SAFETY: the loaded executable is valid; the new handle belongs to the caller.
        unsafe { connection.plugin.call(&mut get) }?;
        let executable = non_null(get.executable, "LoadedExecutableGetExecutable")?;
        std::mem::forget(guard);
        // From here on, dropping the structure destroys both handles.
        let mut inner = Inner {
            connection: connection.clone(),
            loaded,
            executable,
            name: name.into(),
            num_outputs: 0,
            devices: Vec::new(),
        };
        let mut outputs = sys::ExecutableNumOutputs::new();
        outputs.executable = executable.as_ptr();
        let mut devices = sys::LoadedExecutableAddressableDevices::new();
        devices.executable = loaded.as_ptr();
        // SAFETY: both handles are valid; the array of devices lives as long as the executable.
        let raw_devices = unsafe {
            connection.plugin.call(&mut outputs)?;
            connection.plugin.call(&mut devices)?;
            array(devices.devices, devices.num_devices)
        };
        inner.num_outputs = outputs.num_outputs;
        for raw in raw_devices {
            let index = connection.device_index(*raw);
            inner.devices.push(index.ok_or_else(|| {
                Error::Argument(format!("program `{name}` runs on a device that this process does not have"))
            })?);
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The name that was given when it was compiled.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The devices that it runs on, by index among the client's.
    pub fn devices(&self) -> &[usize] {
        &self.inner.devices
    }

    /// The number of results on each device.
    pub fn num_outputs(&self) -> usize {
        self.inner.num_outputs
    }

    /// Starts the program, with the arguments of each of its devices.
    ///
    /// # Errors
    /// The arguments do not fit. Errors of the run itself come from the outputs and events.
    pub fn execute(&self, arguments: Vec<Vec<Argument<'_>>>) -> Result<Execution, Error> {
        let inner = &*self.inner;
        self.check(&arguments)?;
        let num_devices = inner.devices.len();
        let num_arguments = arguments[0].len();
        let raw_arguments: Vec<Vec<*mut sys::Buffer>> = arguments
            .iter()
            .map(|arguments| arguments.iter().map(|argument| argument.buffer().raw()).collect())
            .collect();
        let argument_lists: Vec<*const *mut sys::Buffer> =
            raw_arguments.iter().map(|list| list.as_ptr()).collect();
        let mut raw_outputs = vec![vec![std::ptr::null_mut::<sys::Buffer>(); inner.num_outputs]; num_devices];
        let output_lists: Vec<*mut *mut sys::Buffer> =
            raw_outputs.iter_mut().map(|list| list.as_mut_ptr()).collect();
        let mut raw_events = vec![std::ptr::null_mut::<sys::Event>(); num_devices];
        let is_borrowed =
            |index: &usize| arguments.iter().any(|list| matches!(list[*index], Argument::Borrow(_)));
        let kept: Vec<i64> = (0..num_arguments).filter(is_borrowed).map(|index| index as i64).collect();

        let mut options = sys::ExecuteOptions::new();
        options.non_donatable_input_indices = kept.as_ptr();
        options.num_non_donatable_input_indices = kept.len();
        let mut call = sys::LoadedExecutableExecute::new();
        call.executable = inner.loaded.as_ptr();
        call.options = &raw mut options;
        call.argument_lists = argument_lists.as_ptr();
        call.num_devices = num_devices;
        call.num_args = num_arguments;
        call.output_lists = output_lists.as_ptr();
        call.device_complete_events = raw_events.as_mut_ptr();
        // SAFETY: the executable is valid; the lists have the lengths given, the buffers are valid and of the same
        // client, as checked, and all outlive the call. Donated buffers are not used after it.
        unsafe { inner.connection.plugin.call(&mut call) }.map_err(|error| error.in_program(self.name()))?;

        let mut execution = Execution { outputs: Vec::with_capacity(num_devices), done: Vec::new() };
        // SAFETY: the events were just created for this call.
        let events = raw_events.iter().map(|raw| unsafe { Event::from_raw(*raw, &inner.connection) });
        execution.done.extend(events.flatten());
        // All are taken over before one's error ends this, so that those of every device are freed.
        let outputs: Vec<Vec<Result<Buffer, Error>>> = raw_outputs
            .iter()
            .zip(&inner.devices)
            .map(|(list, device)| {
                let take_over = |raw: &*mut sys::Buffer| {
                    let raw = non_null(*raw, "LoadedExecutableExecute")?;
                    // SAFETY: the buffers were just created for this call.
                    unsafe { Buffer::from_raw(raw, &inner.connection, *device, Some(inner.name.clone())) }
                };
                list.iter().map(take_over).collect()
            })
            .collect();
        for list in outputs {
            execution.outputs.push(list.into_iter().collect::<Result<_, _>>()?);
        }
        drop(arguments);
        Ok(execution)
    }

    fn check(&self, arguments: &[Vec<Argument<'_>>]) -> Result<(), Error> {
        let name = self.name();
        if arguments.len() != self.inner.devices.len() {
            let (given, needed) = (arguments.len(), self.inner.devices.len());
            return Err(Error::Argument(format!(
                "program `{name}` runs on {needed} devices, but arguments are given for {given}"
            )));
        }
        for (list, device) in arguments.iter().zip(&self.inner.devices) {
            if list.len() != arguments[0].len() {
                return Err(Error::Argument(format!(
                    "devices of program `{name}` have different argument counts"
                )));
            }
            for (index, argument) in list.iter().enumerate() {
                let buffer = argument.buffer();
                if !Arc::ptr_eq(buffer.connection(), &self.inner.connection) {
                    return Err(Error::Argument(format!(
                        "argument {index} of program `{name}` belongs to another client"
                    )));
                }
                if buffer.device() != *device {
                    return Err(Error::Argument(format!(
                        "argument {index} of program `{name}` is on device {} instead of {device}",
                        buffer.device()
                    )));
                }
            }
        }
        Ok(())
    }

    /// The executable as bytes, for [`Client::load_executable`] of the same plugin on a machine of the same kind.
    ///
    /// # Errors
    /// The platform cannot do that.
    pub fn serialize(&self) -> Result<Vec<u8>, Error> {
        let mut arguments = sys::ExecutableSerialize::new();
        arguments.executable = self.inner.executable.as_ptr();
        // SAFETY: the executable is valid. The bytes live until the deleter is called, once, on their owner.
        unsafe {
            self.inner
                .connection
                .plugin
                .call(&mut arguments)
                .map_err(|error| error.in_program(self.name()))?;
            let bytes = arguments.serialized_bytes.cast::<u8>();
            let bytes = array(bytes, arguments.serialized_bytes_size).to_vec();
            if let Some(deleter) = arguments.deleter {
                deleter(arguments.serialized_executable);
            }
            Ok(bytes)
        }
    }

    /// What the program needs in each device's memory.
    ///
    /// # Errors
    /// The platform does not say.
    pub fn memory(&self) -> Result<MemoryUse, Error> {
        let mut arguments = sys::ExecutableGetCompiledMemoryStats::new();
        arguments.executable = self.inner.executable.as_ptr();
        // SAFETY: the executable is valid.
        unsafe { self.inner.connection.plugin.call(&mut arguments) }
            .map_err(|error| error.in_program(self.name()))?;
        let bytes = |value: i64| value.max(0) as u64;
        Ok(MemoryUse {
            code: bytes(arguments.generated_code_size),
            arguments: bytes(arguments.argument_size),
            outputs: bytes(arguments.output_size),
            aliased: bytes(arguments.alias_size),
            temporaries: bytes(arguments.temp_size),
            host_arguments: bytes(arguments.host_argument_size),
            host_outputs: bytes(arguments.host_output_size),
            host_aliased: bytes(arguments.host_alias_size),
            host_temporaries: bytes(arguments.host_temp_size),
            peak: bytes(arguments.peak_memory),
        })
    }

    /// What the compiler estimates, such as `flops`. A loop's body counts once.
    ///
    /// # Errors
    /// The platform does not estimate.
    pub fn cost_analysis(&self) -> Result<Vec<(String, NamedValue)>, Error> {
        let mut arguments = sys::ExecutableGetCostAnalysis::new();
        arguments.executable = self.inner.executable.as_ptr();
        // SAFETY: the executable is valid; the properties live as long as it does.
        unsafe {
            self.inner
                .connection
                .plugin
                .call(&mut arguments)
                .map_err(|error| error.in_program(self.name()))?;
            Ok(named_values(arguments.properties, arguments.num_properties))
        }
    }

    /// The program after optimization, and the format of these bytes, such as `hlo_with_config`, a protocol buffer.
    ///
    /// # Errors
    /// The platform does not keep it.
    pub fn optimized_program(&self) -> Result<(String, Vec<u8>), Error> {
        let mut program = sys::Program::new();
        let mut arguments = sys::ExecutableOptimizedProgram::new();
        arguments.executable = self.inner.executable.as_ptr();
        arguments.program = &raw mut program;
        let plugin = &self.inner.connection.plugin;
        // SAFETY: the executable and the program are valid. The first call sets the size, the second fills as many
        // bytes; the format is a string of the plugin's.
        unsafe {
            plugin.call(&mut arguments).map_err(|error| error.in_program(self.name()))?;
            let mut code = vec![0_u8; (*arguments.program).code_size];
            (*arguments.program).code = code.as_mut_ptr().cast();
            plugin.call(&mut arguments).map_err(|error| error.in_program(self.name()))?;
            let format = crate::plugin::text((*arguments.program).format, (*arguments.program).format_size);
            Ok((format, code))
        }
    }
}

const FORMAT: &str = "mlir";

impl Drop for Inner {
    fn drop(&mut self) {
        let mut executable = sys::ExecutableDestroy::new();
        executable.executable = self.executable.as_ptr();
        let mut loaded = sys::LoadedExecutableDestroy::new();
        loaded.executable = self.loaded.as_ptr();
        // SAFETY: both handles are valid and are not used again; running executions hold what they need.
        unsafe {
            self.connection.plugin.call_plain(&mut executable);
            self.connection.plugin.call_plain(&mut loaded);
        }
    }
}

impl fmt::Debug for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executable({}, {} devices)", self.name(), self.devices().len())
    }
}

/// A loaded executable that is destroyed unless it becomes part of an [`Inner`].
struct Loaded<'a> {
    connection: &'a Connection,
    raw: NonNull<sys::LoadedExecutable>,
}

impl Drop for Loaded<'_> {
    fn drop(&mut self) {
        let mut arguments = sys::LoadedExecutableDestroy::new();
        arguments.executable = self.raw.as_ptr();
        // SAFETY: the handle is valid and is not used again.
        unsafe { self.connection.plugin.call_plain(&mut arguments) };
    }
}
