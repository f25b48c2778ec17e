//! The subset of the PJRT C API that this crate uses, as of the header of API 0.81.
//!
//! Each API call takes a pointer to its own argument structure and returns an error or null. The API's table is an
//! array of such functions; [`Arguments::SLOT`] is the index of a structure's function.

#![allow(non_upper_case_globals)]

use std::{
    ffi::{c_char, c_int, c_void},
    mem::MaybeUninit,
    ptr,
};

/// The version of the header, and the oldest accepted version.
pub const MINIMUM_VERSION: (c_int, c_int) = (0, 81);

/// Zeroed space after every argument structure, included in its `struct_size`.
///
/// A plugin refuses a structure smaller than the one it was compiled with and accepts a larger one. Fields that later
/// versions append are optional, and zero means absent. With this space newer plugins work, too.
const RESERVED: usize = 128;

macro_rules! opaque {
    ($($name:ident)*) => {$(
        #[repr(C)]
        pub struct $name {
            _private: [u8; 0],
        }
    )*};
}

opaque! {
    Extension Error Event Client Device DeviceDescription Memory Executable LoadedExecutable Buffer
    SerializedExecutable ExecuteContext TopologyDescription
}

/// The argument structure of one call.
///
/// # Safety
/// The structure has the layout of the header's, and `SLOT` is the index of its function in the API's table.
pub unsafe trait Arguments {
    const SLOT: usize;
    const CALL: &'static str;
}

macro_rules! calls {
    ($($slot:literal $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {$(
        #[repr(C)]
        pub struct $name {
            pub struct_size: usize,
            pub extension_start: *mut Extension,
            $(pub $field: $type,)*
            reserved: [u8; RESERVED],
        }

        impl $name {
            pub fn new() -> Self {
                // SAFETY: all fields are integers, booleans, nullable pointers, optional functions or structures of
                // these, for which zero is a valid value.
                let mut arguments = unsafe { MaybeUninit::<Self>::zeroed().assume_init() };
                arguments.struct_size = size_of::<Self>();
                arguments
            }
        }

        // SAFETY: slots and fields are those of the header; tests call each of them.
        unsafe impl Arguments for $name {
            const SLOT: usize = $slot;
            const CALL: &'static str = stringify!($name);
        }
    )*};
}

calls! {
    0 ErrorDestroy { error: *mut Error }
    1 ErrorMessage { error: *const Error, message: *const c_char, message_size: usize }
    2 ErrorGetCode { error: *const Error, code: c_int }
    3 PluginInitialize {}
    4 PluginAttributes { attributes: *const NamedValue, num_attributes: usize }
    5 EventDestroy { event: *mut Event }
    6 EventIsReady { event: *mut Event, is_ready: bool }
    8 EventAwait { event: *mut Event }
    9 EventOnReady { event: *mut Event, callback: Option<OnReady>, user_arg: *mut c_void }
    10 ClientCreate {
        create_options: *const NamedValue,
        num_options: usize,
        kv_get_callback: *mut c_void,
        kv_get_user_arg: *mut c_void,
        kv_put_callback: *mut c_void,
        kv_put_user_arg: *mut c_void,
        client: *mut Client,
        kv_try_get_callback: *mut c_void,
        kv_try_get_user_arg: *mut c_void,
    }
    11 ClientDestroy { client: *mut Client }
    12 ClientPlatformName { client: *mut Client, name: *const c_char, name_size: usize }
    14 ClientPlatformVersion { client: *mut Client, version: *const c_char, version_size: usize }
    16 ClientAddressableDevices { client: *mut Client, devices: *const *mut Device, num_devices: usize }
    20 ClientCompile {
        client: *mut Client,
        program: *const Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        executable: *mut LoadedExecutable,
    }
    22 ClientBufferFromHostBuffer {
        client: *mut Client,
        data: *const c_void,
        element_type: c_int,
        dims: *const i64,
        num_dims: usize,
        byte_strides: *const i64,
        num_byte_strides: usize,
        host_buffer_semantics: c_int,
        device: *mut Device,
        memory: *mut Memory,
        device_layout: *mut MemoryLayout,
        done_with_host_buffer: *mut Event,
        buffer: *mut Buffer,
    }
    23 DeviceDescriptionId { description: *mut DeviceDescription, id: c_int }
    25 DeviceDescriptionAttributes {
        description: *mut DeviceDescription,
        num_attributes: usize,
        attributes: *const NamedValue,
    }
    26 DeviceDescriptionKind { description: *mut DeviceDescription, kind: *const c_char, kind_size: usize }
    29 DeviceGetDescription { device: *mut Device, description: *mut DeviceDescription }
    32 DeviceAddressableMemories { device: *mut Device, memories: *const *mut Memory, num_memories: usize }
    33 DeviceDefaultMemory { device: *mut Device, memory: *mut Memory }
    34 DeviceMemoryStats {
        device: *mut Device,
        bytes_in_use: i64,
        peak_bytes_in_use: i64,
        peak_bytes_in_use_is_set: bool,
        num_allocs: i64,
        num_allocs_is_set: bool,
        largest_alloc_size: i64,
        largest_alloc_size_is_set: bool,
        bytes_limit: i64,
        bytes_limit_is_set: bool,
        bytes_reserved: i64,
        bytes_reserved_is_set: bool,
        peak_bytes_reserved: i64,
        peak_bytes_reserved_is_set: bool,
        bytes_reservable_limit: i64,
        bytes_reservable_limit_is_set: bool,
        largest_free_block_bytes: i64,
        largest_free_block_bytes_is_set: bool,
        pool_bytes: i64,
        pool_bytes_is_set: bool,
        peak_pool_bytes: i64,
        peak_pool_bytes_is_set: bool,
    }
    35 MemoryId { memory: *mut Memory, id: c_int }
    36 MemoryKind { memory: *mut Memory, kind: *const c_char, kind_size: usize }
    40 ExecutableDestroy { executable: *mut Executable }
    44 ExecutableNumOutputs { executable: *mut Executable, num_outputs: usize }
    46 ExecutableGetCostAnalysis {
        executable: *mut Executable,
        num_properties: usize,
        properties: *const NamedValue,
    }
    48 ExecutableOptimizedProgram { executable: *mut Executable, program: *mut Program }
    49 ExecutableSerialize {
        executable: *const Executable,
        serialized_bytes: *const c_char,
        serialized_bytes_size: usize,
        serialized_executable: *mut SerializedExecutable,
        deleter: Option<unsafe extern "C" fn(*mut SerializedExecutable)>,
    }
    50 LoadedExecutableDestroy { executable: *mut LoadedExecutable }
    51 LoadedExecutableGetExecutable { loaded_executable: *mut LoadedExecutable, executable: *mut Executable }
    52 LoadedExecutableAddressableDevices {
        executable: *mut LoadedExecutable,
        devices: *const *mut Device,
        num_devices: usize,
    }
    55 LoadedExecutableExecute {
        executable: *mut LoadedExecutable,
        options: *mut ExecuteOptions,
        argument_lists: *const *const *mut Buffer,
        num_devices: usize,
        num_args: usize,
        output_lists: *const *mut *mut Buffer,
        device_complete_events: *mut *mut Event,
        execute_device: *mut Device,
    }
    56 ExecutableDeserializeAndLoad {
        client: *mut Client,
        serialized_executable: *const c_char,
        serialized_executable_size: usize,
        loaded_executable: *mut LoadedExecutable,
        overridden_compile_options: *const c_char,
        overridden_compile_options_size: usize,
    }
    58 BufferDestroy { buffer: *mut Buffer }
    59 BufferElementType { buffer: *mut Buffer, element_type: c_int }
    60 BufferDimensions { buffer: *mut Buffer, dims: *const i64, num_dims: usize }
    64 BufferOnDeviceSizeInBytes { buffer: *mut Buffer, size: usize }
    70 BufferToHostBuffer {
        buffer: *mut Buffer,
        host_layout: *mut MemoryLayout,
        dst: *mut c_void,
        dst_size: usize,
        event: *mut Event,
    }
    72 BufferReadyEvent { buffer: *mut Buffer, event: *mut Event }
    82 TopologyCreate {
        topology_name: *const c_char,
        topology_name_size: usize,
        create_options: *const NamedValue,
        num_options: usize,
        topology: *mut TopologyDescription,
    }
    83 TopologyDestroy { topology: *mut TopologyDescription }
    84 TopologyPlatformName { topology: *const TopologyDescription, name: *const c_char, name_size: usize }
    86 TopologyDeviceDescriptions {
        topology: *const TopologyDescription,
        descriptions: *const *mut DeviceDescription,
        num_descriptions: usize,
    }
    89 Compile {
        topology: *const TopologyDescription,
        program: *const Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        client: *mut Client,
        executable: *mut Executable,
    }
    92 BufferCopyToMemory { buffer: *mut Buffer, dst_memory: *mut Memory, dst_buffer: *mut Buffer }
    96 ExecutableGetCompiledMemoryStats {
        executable: *mut Executable,
        generated_code_size: i64,
        argument_size: i64,
        output_size: i64,
        alias_size: i64,
        temp_size: i64,
        host_generated_code_size: i64,
        host_argument_size: i64,
        host_output_size: i64,
        host_alias_size: i64,
        host_temp_size: i64,
        peak_memory: i64,
    }
}

/// The number of functions in the API's table at [`MINIMUM_VERSION`].
pub const NUM_SLOTS: usize = 118;

pub type Function = unsafe extern "C" fn(*mut c_void) -> *mut Error;
pub type OnReady = unsafe extern "C" fn(*mut Error, *mut c_void);

#[repr(C)]
pub struct ApiVersion {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub major: c_int,
    pub minor: c_int,
}

#[repr(C)]
pub struct Api {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub version: ApiVersion,
    /// Only the slots below [`NUM_SLOTS`] are used, all of which exist at [`MINIMUM_VERSION`].
    pub functions: [Option<Function>; NUM_SLOTS],
}

/// The head of every extension of the API.
#[repr(C)]
pub struct ExtensionBase {
    pub struct_size: usize,
    pub kind: c_int,
    pub next: *mut Self,
}

/// `PJRT_Extension_Type_Profiler`
pub const EXTENSION_PROFILER: c_int = 1;

/// `PJRT_Profiler_Extension`
#[repr(C)]
pub struct ProfilerExtension {
    pub base: ExtensionBase,
    pub api: *const ProfilerApi,
    pub context: i64,
}

#[repr(C)]
pub struct ProfilerError {
    _private: [u8; 0],
}

#[repr(C)]
pub struct ProfilerSession {
    _private: [u8; 0],
}

pub type ProfilerFunction = unsafe extern "C" fn(*mut c_void) -> *mut ProfilerError;

/// `PLUGIN_Profiler_Api`
#[repr(C)]
pub struct ProfilerApi {
    pub struct_size: usize,
    pub private: *mut c_void,
    pub error_destroy: Option<ProfilerFunction>,
    pub error_message: Option<ProfilerFunction>,
    pub error_get_code: Option<ProfilerFunction>,
    pub create: Option<ProfilerFunction>,
    pub destroy: Option<ProfilerFunction>,
    pub start: Option<ProfilerFunction>,
    pub stop: Option<ProfilerFunction>,
    pub collect_data: Option<ProfilerFunction>,
}

/// `PLUGIN_Profiler_Error_Destroy_Args`
#[repr(C)]
pub struct ProfilerErrorDestroy {
    pub struct_size: usize,
    pub private: *mut c_void,
    pub error: *mut ProfilerError,
}

/// `PLUGIN_Profiler_Error_Message_Args`
#[repr(C)]
pub struct ProfilerErrorMessage {
    pub struct_size: usize,
    pub private: *mut c_void,
    pub error: *const ProfilerError,
    pub message: *const c_char,
    pub message_size: usize,
}

/// `PLUGIN_Profiler_Error_GetCode_Args`
#[repr(C)]
pub struct ProfilerErrorGetCode {
    pub struct_size: usize,
    pub private: *mut c_void,
    pub error: *const ProfilerError,
    pub code: c_int,
}

/// `PLUGIN_Profiler_Create_Args`
#[repr(C)]
pub struct ProfilerCreate {
    pub struct_size: usize,
    /// A serialized `ProfileOptions`.
    pub options: *const c_char,
    pub options_size: usize,
    pub session: *mut ProfilerSession,
}

/// The arguments of `PLUGIN_Profiler_Start`, `PLUGIN_Profiler_Stop` and `PLUGIN_Profiler_Destroy`.
#[repr(C)]
pub struct ProfilerHandle {
    pub struct_size: usize,
    pub session: *mut ProfilerSession,
}

/// `PLUGIN_Profiler_CollectData_Args`
#[repr(C)]
pub struct ProfilerCollect {
    pub struct_size: usize,
    pub session: *mut ProfilerSession,
    pub buffer: *mut u8,
    pub buffer_size: usize,
}

/// `PJRT_Extension_Type_FFI`
pub const EXTENSION_FFI: c_int = 5;

/// `PJRT_FFI_Extension`
#[repr(C)]
pub struct FfiExtension {
    pub base: ExtensionBase,
    pub register_type: Option<Function>,
    pub add_user_data: Option<Function>,
    pub register_handler: Option<Function>,
}

/// `PJRT_FFI_Register_Handler_Args`, which has no extensions.
#[repr(C)]
pub struct RegisterHandler {
    pub struct_size: usize,
    pub target_name: *const c_char,
    pub target_name_size: usize,
    pub handler: *mut c_void,
    pub platform_name: *const c_char,
    pub platform_name_size: usize,
    pub traits: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union NamedValueContents {
    pub string: *const c_char,
    pub integer: i64,
    pub integers: *const i64,
    pub float: f32,
    pub boolean: bool,
}

/// A key with a value. It is an element of arrays, and therefore has no reserved space.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NamedValue {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub name: *const c_char,
    pub name_size: usize,
    pub kind: c_int,
    pub contents: NamedValueContents,
    /// The number of elements of a string or a list, 1 for a scalar.
    pub value_size: usize,
}

pub const NAMED_STRING: c_int = 0;
pub const NAMED_INTEGER: c_int = 1;
pub const NAMED_INTEGERS: c_int = 2;
pub const NAMED_FLOAT: c_int = 3;
pub const NAMED_BOOLEAN: c_int = 4;

#[repr(C)]
pub struct Program {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub code: *mut c_char,
    pub code_size: usize,
    pub format: *const c_char,
    pub format_size: usize,
}

impl Program {
    pub fn new() -> Self {
        Self {
            struct_size: size_of::<Self>(),
            extension_start: ptr::null_mut(),
            code: ptr::null_mut(),
            code_size: 0,
            format: ptr::null(),
            format_size: 0,
        }
    }

    /// A program as StableHLO text. The result points to the text.
    pub fn stablehlo(text: &str) -> Self {
        const FORMAT: &str = "mlir";
        let mut program = Self::new();
        // The plugin only reads the code, although the pointer is not to constant memory.
        program.code = text.as_ptr().cast_mut().cast();
        program.code_size = text.len();
        program.format = FORMAT.as_ptr().cast();
        program.format_size = FORMAT.len();
        program
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct TiledLayout {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub minor_to_major: *const i64,
    pub minor_to_major_size: usize,
    pub tile_dims: *const i64,
    pub tile_dim_sizes: *const usize,
    pub num_tiles: usize,
}

/// The layout of a buffer. The header's union with strides is omitted: strides are smaller and unused.
#[repr(C)]
pub struct MemoryLayout {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub tiled: TiledLayout,
    pub kind: c_int,
}

#[repr(C)]
pub struct ExecuteOptions {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub send_callbacks: *mut c_void,
    pub recv_callbacks: *mut c_void,
    pub num_send_ops: usize,
    pub num_recv_ops: usize,
    pub launch_id: c_int,
    pub non_donatable_input_indices: *const i64,
    pub num_non_donatable_input_indices: usize,
    pub context: *mut ExecuteContext,
    pub call_location: *const c_char,
    pub num_tasks: usize,
    pub task_ids: *mut c_int,
    pub incarnation_ids: *mut i64,
    reserved: [u8; RESERVED],
}

impl ExecuteOptions {
    pub fn new() -> Self {
        // SAFETY: all fields are integers or nullable pointers, for which zero is a valid value.
        let mut options = unsafe { MaybeUninit::<Self>::zeroed().assume_init() };
        options.struct_size = size_of::<Self>();
        options
    }
}

pub const IMMUTABLE_ONLY_DURING_CALL: c_int = 0;
pub const IMMUTABLE_UNTIL_TRANSFER_COMPLETES: c_int = 1;
pub const IMMUTABLE_ZERO_COPY: c_int = 2;
pub const MUTABLE_ZERO_COPY: c_int = 3;

pub const TILED: c_int = 0;
