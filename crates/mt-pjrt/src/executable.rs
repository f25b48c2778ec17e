//! Compiled programs.

use std::{
    fmt,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering},
    },
};

use crate::{
    Buffer, Client, CompileOptions, CompiledProgram, Error, Event,
    client::{Connection, non_null},
    plugin::array,
    sys,
};

/// A compiled program, loaded on its devices. Clones share it.
#[derive(Clone)]
pub struct Executable {
    inner: Arc<Inner>,
}

struct Inner {
    /// Declared before the connection, so that it is dropped first.
    program: CompiledProgram,
    loaded: Loaded,
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
    /// The program leaves the buffer unchanged.
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

/// A started program. Its outputs can be used at once: operations that use them wait.
#[derive(Debug)]
pub struct Execution {
    /// The results of each device.
    pub outputs: Vec<Vec<Buffer>>,
    /// For each device, the event that marks the program's end.
    pub done: Vec<Event>,
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
        let program = sys::Program::stablehlo(stablehlo);
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
        let loaded = Loaded { connection: connection.clone(), raw: loaded };
        let mut get = sys::LoadedExecutableGetExecutable::new();
        get.loaded_executable = loaded.raw.as_ptr();
        // SAFETY: the loaded executable is valid; the new handle belongs to the caller.
        unsafe { connection.plugin.call(&mut get) }?;
        let executable = non_null(get.executable, "LoadedExecutableGetExecutable")?;
        // SAFETY: the handle was just created for this call; the client outlives it, as it is dropped first.
        let program = unsafe { CompiledProgram::from_raw(executable, &connection.plugin, name) };
        let mut outputs = sys::ExecutableNumOutputs::new();
        outputs.executable = executable.as_ptr();
        let mut devices = sys::LoadedExecutableAddressableDevices::new();
        devices.executable = loaded.raw.as_ptr();
        // SAFETY: both handles are valid; the array of devices lives as long as the executable.
        let raw_devices = unsafe {
            connection.plugin.call(&mut outputs)?;
            connection.plugin.call(&mut devices)?;
            array(devices.devices, devices.num_devices)
        };
        let devices = raw_devices.iter().map(|raw| {
            connection.device_index(*raw).ok_or_else(|| {
                Error::Argument(format!("program `{name}` runs on a device that this process does not have"))
            })
        });
        let devices = devices.collect::<Result<_, _>>()?;
        Ok(Self { inner: Arc::new(Inner { program, loaded, num_outputs: outputs.num_outputs, devices }) })
    }

    /// The name given at compilation.
    pub fn name(&self) -> &str {
        self.inner.program.name()
    }

    /// The compiled program with the compiler's reports.
    pub fn program(&self) -> &CompiledProgram {
        &self.inner.program
    }

    /// The devices on which it runs, by index among the client's.
    pub fn devices(&self) -> &[usize] {
        &self.inner.devices
    }

    /// The number of results on each device.
    pub fn num_outputs(&self) -> usize {
        self.inner.num_outputs
    }

    /// Starts the program with the arguments of each of its devices.
    ///
    /// # Errors
    /// The arguments do not fit. Outputs and events report errors of the run itself.
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
        options.launch_id = next_launch();
        let mut call = sys::LoadedExecutableExecute::new();
        call.executable = inner.loaded.raw.as_ptr();
        call.options = &raw mut options;
        call.argument_lists = argument_lists.as_ptr();
        call.num_devices = num_devices;
        call.num_args = num_arguments;
        call.output_lists = output_lists.as_ptr();
        call.device_complete_events = raw_events.as_mut_ptr();
        // SAFETY: the executable is valid; the lists have the lengths given, the buffers are valid and of the same
        // client, as checked, and all outlive the call. Donated buffers are not used after it.
        unsafe { inner.loaded.connection.plugin.call(&mut call) }
            .map_err(|error| error.in_program(self.name()))?;

        let mut execution = Execution { outputs: Vec::with_capacity(num_devices), done: Vec::new() };
        // SAFETY: the events were just created for this call.
        let events = raw_events.iter().map(|raw| unsafe { Event::from_raw(*raw, &inner.loaded.connection) });
        execution.done.extend(events.flatten());
        // All buffers are taken over before any error returns, so that those of every device are freed.
        let outputs: Vec<Vec<Result<Buffer, Error>>> = raw_outputs
            .iter()
            .zip(&inner.devices)
            .map(|(list, device)| {
                let take_over = |raw: &*mut sys::Buffer| {
                    let raw = non_null(*raw, "LoadedExecutableExecute")?;
                    // SAFETY: the buffers were just created for this call.
                    unsafe {
                        Buffer::from_raw(
                            raw,
                            &inner.loaded.connection,
                            *device,
                            Some(inner.program.shared_name()),
                        )
                    }
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
                if !Arc::ptr_eq(buffer.connection(), &self.inner.loaded.connection) {
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
}

/// A number for each execution of this process. On CPUs, devices that communicate find each other by it: with one number for
/// all, two programs that run at once, or two steps of which one begins before the other has ended, would exchange data.
fn next_launch() -> i32 {
    static NEXT: AtomicI32 = AtomicI32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed) & i32::MAX
}

impl fmt::Debug for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executable({}, {} devices)", self.name(), self.devices().len())
    }
}

/// The handle of a loaded executable, which keeps its client alive.
struct Loaded {
    connection: Arc<Connection>,
    raw: NonNull<sys::LoadedExecutable>,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let mut arguments = sys::LoadedExecutableDestroy::new();
        arguments.executable = self.raw.as_ptr();
        // SAFETY: the handle is valid and is not used again; running executions hold what they need.
        unsafe { self.connection.plugin.call_plain(&mut arguments) };
    }
}
