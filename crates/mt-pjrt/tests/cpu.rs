//! Programs on the CPU plugin, which is installed into the user's cache if the machine has none.

use std::sync::{Arc, OnceLock};

use mt_pjrt::{
    Argument, Buffer, Client, ClientOptions, CompileOptions, Error, ErrorCode, Executable, Platform, Plugin,
    find_or_install,
};
use mt_shape::{DType, HostArray};

/// A client of 8 devices, shared by all tests.
fn client() -> &'static Client {
    static CLIENT: OnceLock<Client> = OnceLock::new();
    CLIENT.get_or_init(|| {
        Client::new(&plugin(), &ClientOptions { num_cpu_devices: 8, ..ClientOptions::default() }).unwrap()
    })
}

fn plugin() -> Plugin {
    Plugin::load(&find_or_install(Platform::Cpu, None, &mut |_| {}).unwrap().path).unwrap()
}

fn compile(name: &str, text: &str) -> Executable {
    client().compile(name, text, &CompileOptions::default()).unwrap()
}

fn floats(dims: &[usize], values: &[f32]) -> Buffer {
    let host = HostArray::from_slice(DType::F32, dims, values).unwrap();
    Buffer::from_bytes(client(), 0, DType::F32, dims, host.bytes()).unwrap()
}

fn run(executable: &Executable, arguments: Vec<Argument<'_>>) -> Vec<Buffer> {
    executable.execute(vec![arguments]).unwrap().outputs.remove(0)
}

/// Adds two arrays of one type.
fn add(ty: &str) -> String {
    format!(
        "module @add {{ func.func public @main(%a: tensor<{ty}>, %b: tensor<{ty}>) -> tensor<{ty}> {{
           %c = stablehlo.add %a, %b : tensor<{ty}>
           return %c : tensor<{ty}> }} }}"
    )
}

#[test]
fn a_client_describes_itself() {
    let client = client();
    assert_eq!(client.platform_name(), "cpu");
    assert_eq!(client.num_devices(), 8);
    let devices = client.devices();
    assert_eq!(devices.iter().map(|device| device.index()).collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
    assert!(!devices[0].kind().is_empty());
    assert!(devices[0].default_memory().is_some());
    assert!(devices[0].memories().len() > 1);
    assert!(client.device(8).unwrap_err().to_string().contains("no device 8"));
    assert!(client.plugin().api_version() >= (0, 81));
    let attributes = client.plugin().attributes().unwrap();
    assert!(attributes.iter().any(|(name, _)| name == "stablehlo_current_version"), "{attributes:?}");
}

#[test]
fn arrays_of_every_type_and_odd_shapes_come_back_as_they_went() {
    for dtype in DType::ALL {
        for dims in [&[][..], &[1], &[7], &[3, 5, 1], &[0], &[3, 0, 2], &[2, 3, 5, 7]] {
            let mut host = HostArray::zeros(dtype, dims);
            let modulus = match dtype {
                DType::Bool => 2,
                DType::I4 => 8,
                _ => 60,
            };
            host.bytes_mut().iter_mut().enumerate().for_each(|(index, byte)| *byte = (index % modulus) as u8);
            let copied = Buffer::from_bytes(client(), 3, dtype, dims, host.bytes()).unwrap();
            assert_eq!((copied.dtype(), copied.dims(), copied.device()), (dtype, dims, 3));
            assert_eq!(copied.to_host().unwrap(), host);
            let shared = Buffer::from_host(client(), 0, Arc::new(host.clone())).unwrap();
            assert_eq!(shared.to_host().unwrap(), host);
        }
    }
}

#[test]
fn programs_compute_with_numbers_of_4_and_8_bits() {
    // From an array of `given` over a narrow type to `f32`.
    let check = |given: DType, narrow: DType, bytes: &[u8], expected: &[f32]| {
        let ty = |dtype: DType| format!("tensor<{}x{}>", bytes.len(), dtype.stablehlo());
        let (from, within, to) = (ty(given), ty(narrow), ty(DType::F32));
        let text = format!(
            "module @narrow {{ func.func public @main(%a: {from}) -> {to} {{
               %b = stablehlo.convert %a : ({from}) -> {within}
               %c = stablehlo.convert %b : ({within}) -> {to}
               return %c : {to} }} }}"
        );
        let executable = compile(narrow.name(), &text);
        let array = Buffer::from_bytes(client(), 0, given, &[bytes.len()], bytes).unwrap();
        let result = run(&executable, vec![Argument::Borrow(&array)]).remove(0).to_host().unwrap();
        assert_eq!(result.as_slice::<f32>().unwrap(), expected, "{narrow}");
        let host = HostArray::from_bytes(narrow, &[bytes.len()], bytes).unwrap();
        let wide: Vec<f64> = expected.iter().map(|value| f64::from(*value)).collect();
        assert_eq!(host.to_f64(), wide, "{narrow}");
    };
    // XLA's programs on CPUs refuse arguments of 4 bits, which they want packed.
    check(DType::I8, DType::I4, &[0, 1, 7, 0xff, 0xf8], &[0.0, 1.0, 7.0, -1.0, -8.0]);
    let e4m3fn = DType::F8E4M3FN;
    check(e4m3fn, e4m3fn, &[0x38, 0xb8, 0x7e, 0x01], &[1.0, -1.0, 448.0, 2_f32.powi(-9)]);
    check(DType::F8E5M2, DType::F8E5M2, &[0x3c, 0xbc, 0x7b, 0x01], &[1.0, -1.0, 57_344.0, 2_f32.powi(-16)]);
}

#[test]
fn wrong_sizes_are_refused() {
    let error = Buffer::from_bytes(client(), 0, DType::F32, &[2], &[0; 4]).unwrap_err();
    assert!(error.to_string().contains("4 bytes given for `float32[2]`, which takes 8"), "{error}");
}

#[test]
fn programs_add() {
    let executable = compile("add", &add("3x5xf32"));
    let a = floats(&[3, 5], &[1.5; 15]);
    let b = floats(&[3, 5], &[2.0; 15]);
    let sum = run(&executable, vec![Argument::Borrow(&a), Argument::Borrow(&b)]).remove(0);
    sum.wait().unwrap();
    assert_eq!(sum.to_host().unwrap().as_slice::<f32>().unwrap(), [3.5; 15]);
    // The same array may be passed twice.
    let double = run(&executable, vec![Argument::Borrow(&a), Argument::Borrow(&a)]).remove(0);
    assert_eq!(double.to_host().unwrap().as_slice::<f32>().unwrap(), [3.0; 15]);
}

#[test]
fn programs_add_bf16_and_booleans_and_nothing() {
    let half = half::bf16::from_f32(0.5);
    let host = HostArray::from_slice(DType::BF16, &[3], &[half; 3]).unwrap();
    let a = Buffer::from_host(client(), 0, Arc::new(host)).unwrap();
    let sum =
        run(&compile("add", &add("3xbf16")), vec![Argument::Borrow(&a), Argument::Borrow(&a)]).remove(0);
    assert_eq!(sum.dtype(), DType::BF16);
    assert_eq!(sum.to_host().unwrap().to_f64(), [1.0; 3]);

    let bits = Buffer::from_bytes(client(), 0, DType::Bool, &[2], &[0, 1]).unwrap();
    let arguments = vec![Argument::Borrow(&bits), Argument::Borrow(&bits)];
    let either = run(&compile("either", &add("2xi1")), arguments).remove(0);
    assert_eq!(either.to_host().unwrap().bytes(), [0, 1]);

    let empty = floats(&[2, 0], &[]);
    let executable = compile("empty", &add("2x0xf32"));
    let sum = run(&executable, vec![Argument::Borrow(&empty), Argument::Borrow(&empty)]).remove(0);
    assert_eq!(sum.dims(), [2, 0]);
    assert_eq!(sum.to_host().unwrap().num_elements(), 0);
}

/// Adds 1 to a large array, whose memory may be reused.
const INCREMENT: &str = "module @increment {
  func.func public @main(%a: tensor<1048576xf32> {tf.aliasing_output = 0 : i32}) -> tensor<1048576xf32> {
    %one = stablehlo.constant dense<1.0> : tensor<1048576xf32>
    %b = stablehlo.add %a, %one : tensor<1048576xf32>
    return %b : tensor<1048576xf32> } }";

#[test]
fn donated_arrays_are_reused_and_borrowed_ones_stay() {
    let executable = compile("increment", INCREMENT);
    let memory = executable.program().memory().unwrap();
    assert_eq!((memory.arguments, memory.outputs, memory.aliased), (4 << 20, 4 << 20, 4 << 20));
    let dims = [1 << 20];
    let a = floats(&dims, &vec![1.0; 1 << 20]);
    let b = run(&executable, vec![Argument::Borrow(&a)]).remove(0);
    assert_eq!(b.to_host().unwrap().as_slice::<f32>().unwrap()[7], 2.0);
    assert_eq!(a.to_host().unwrap().as_slice::<f32>().unwrap()[7], 1.0);
    // A started copy finishes before the memory is reused.
    let pending: Vec<_> = (0..4).map(|_| a.to_host_async().unwrap()).collect();
    let mut c = run(&executable, vec![Argument::Donate(a)]).remove(0);
    for _ in 0..5 {
        c = run(&executable, vec![Argument::Donate(c)]).remove(0);
    }
    for copy in pending {
        assert!(copy.wait().unwrap().as_slice::<f32>().unwrap().iter().all(|value| *value == 1.0));
    }
    assert_eq!(c.to_host().unwrap().as_slice::<f32>().unwrap()[7], 7.0);
}

#[test]
fn host_arrays_without_a_copy_are_kept_and_never_written() {
    let executable = compile("increment", INCREMENT);
    let host = Arc::new(HostArray::from_slice(DType::F32, &[1 << 20], &vec![1.0_f32; 1 << 20]).unwrap());
    let buffer = Buffer::from_host(client(), 0, host.clone()).unwrap();
    assert_eq!(Arc::strong_count(&host), 2, "the buffer is the array's memory");
    let incremented = run(&executable, vec![Argument::Donate(buffer)]).remove(0);
    assert_eq!(incremented.to_host().unwrap().as_slice::<f32>().unwrap()[3], 2.0);
    assert_eq!(host.as_slice::<f32>().unwrap()[3], 1.0);
    drop(incremented);
    // The plugin releases the array in the background.
    let mut patience = 200;
    while Arc::strong_count(&host) > 1 && patience > 0 {
        std::thread::sleep(std::time::Duration::from_millis(10));
        patience -= 1;
    }
    assert_eq!(Arc::strong_count(&host), 1);
}

/// The resident memory of this process in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn zeros_take_memory_when_they_are_used() {
    // An update of one element of 4 GiB.
    let text = "module @update {
      func.func public @main(%a: tensor<1073741824xf32> {tf.aliasing_output = 0 : i32}, %i: tensor<i32>)
          -> tensor<1073741824xf32> {
        %one = stablehlo.constant dense<1.0> : tensor<1xf32>
        %b = stablehlo.dynamic_update_slice %a, %one, %i
            : (tensor<1073741824xf32>, tensor<1xf32>, tensor<i32>) -> tensor<1073741824xf32>
        return %b : tensor<1073741824xf32> } }";
    let read = "module @read {
      func.func public @main(%a: tensor<1073741824xf32>, %i: tensor<i32>) -> tensor<4xf32> {
        %b = stablehlo.dynamic_slice %a, %i, sizes = [4]
            : (tensor<1073741824xf32>, tensor<i32>) -> tensor<4xf32>
        return %b : tensor<4xf32> } }";
    let (update, read) = (compile("update", text), compile("read", read));
    let number =
        |number: i32| Buffer::from_bytes(client(), 0, DType::I32, &[], &number.to_le_bytes()).unwrap();
    let before = resident();
    let mut array = Buffer::zeros(client(), 0, DType::F32, &[1 << 30]).unwrap();
    for place in [5, 500_000_001, 1_000_000_000] {
        let place = number(place);
        array = run(&update, vec![Argument::Donate(array), Argument::Borrow(&place)]).remove(0);
    }
    let around = |place: i32| {
        let arguments = vec![Argument::Borrow(&array), Argument::Donate(number(place - 1))];
        let found = run(&read, arguments).remove(0).to_host().unwrap();
        found.as_slice::<f32>().unwrap().to_vec()
    };
    assert_eq!(around(5), [0.0, 1.0, 0.0, 0.0]);
    assert_eq!(around(500_000_001), [0.0, 1.0, 0.0, 0.0]);
    assert_eq!(around(1000), [0.0; 4]);
    // Other tests take memory meanwhile.
    let taken = resident().saturating_sub(before);
    assert!(taken < 1 << 30, "{taken} bytes of 4 GiB are in memory");
}

#[test]
fn slices_of_host_arrays_are_shared_where_they_are_aligned() {
    let values: Vec<f32> = (0..64_u8).map(f32::from).collect();
    let host = Arc::new(HostArray::from_slice(DType::F32, &[64], &values).unwrap());
    let slice =
        |device, dims: &[usize], range| Buffer::from_host_slice(client(), device, host.clone(), dims, range);
    let aligned = slice(1, &[2, 8], 64..128).unwrap();
    assert_eq!(Arc::strong_count(&host), 2, "the buffer is a slice of the array's memory");
    let copied = slice(2, &[3], 4..16).unwrap();
    assert_eq!(Arc::strong_count(&host), 2, "the buffer is a copy");
    assert_eq!((aligned.dims(), aligned.device()), (&[2, 8][..], 1));
    assert_eq!(aligned.to_host().unwrap().as_slice::<f32>().unwrap(), &values[16..32]);
    assert_eq!(copied.to_host().unwrap().as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0]);
    for (dims, range) in [(2, 0..4), (1, 254..258), (2, 256..264)] {
        let error = slice(0, &[dims], range.clone()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("bytes {range:?} of 256 given for `float32[{dims}]`")), "{error}");
    }
}

#[test]
fn the_cpu_plugin_has_no_profiler() {
    assert!(plugin().start_profile().unwrap().is_none());
}

#[test]
fn eight_devices_share_a_program() {
    let text = r#"module @sharded {
      sdy.mesh @mesh = <["data"=4, "model"=2]>
      func.func public @main(
          %a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"model"}]>},
          %b: tensor<4x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {}]>})
          -> (tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
        %c = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
          : (tensor<8x4xf32>, tensor<4x6xf32>) -> tensor<8x6xf32>
        return %c : tensor<8x6xf32> } }"#;
    let executable = client().compile("sharded", text, &CompileOptions::on_first(8)).unwrap();
    assert_eq!(executable.devices(), [0, 1, 2, 3, 4, 5, 6, 7]);
    // Row r of `a` is filled with r and `b` with ones: each element of row r of the product is 4r.
    let shard = |device: usize, dims: &[usize], value: &dyn Fn(usize) -> f32| {
        let count: usize = dims.iter().product();
        let values: Vec<f32> = (0..count).map(value).collect();
        let host = HostArray::from_slice(DType::F32, dims, &values).unwrap();
        Buffer::from_host(client(), device, Arc::new(host)).unwrap()
    };
    let arguments = (0..8).map(|device| {
        let first_row = device / 2 * 2;
        let a = shard(device, &[2, 2], &|index| (first_row + index / 2) as f32);
        let b = shard(device, &[2, 6], &|_| 1.0);
        vec![Argument::Donate(a), Argument::Donate(b)]
    });
    let execution = executable.execute(arguments.collect()).unwrap();
    for (device, outputs) in execution.outputs.iter().enumerate() {
        assert_eq!(outputs[0].dims(), [2, 6]);
        assert_eq!(outputs[0].device(), device);
        let first_row = (device / 2 * 2) as f32;
        let expected = [[4.0 * first_row; 6], [4.0 * (first_row + 1.0); 6]].concat();
        assert_eq!(outputs[0].to_host().unwrap().as_slice::<f32>().unwrap(), expected);
    }
    assert_eq!(execution.done.len(), 8);
    execution.done.iter().for_each(|event| event.wait().unwrap());
}

#[test]
fn programs_run_on_the_devices_that_were_chosen() {
    let options = CompileOptions { devices: vec![5], ..CompileOptions::default() };
    let executable = client().compile("add", &add("2xf32"), &options).unwrap();
    assert_eq!(executable.devices(), [5]);
    let host = Arc::new(HostArray::from_slice(DType::F32, &[2], &[1.0_f32, 2.0]).unwrap());
    let a = Buffer::from_host(client(), 5, host).unwrap();
    let sum = run(&executable, vec![Argument::Borrow(&a), Argument::Borrow(&a)]).remove(0);
    assert_eq!(sum.device(), 5);
    assert_eq!(sum.to_host().unwrap().to_f64(), [2.0, 4.0]);
    let elsewhere = floats(&[2], &[1.0; 2]);
    let error =
        executable.execute(vec![vec![Argument::Borrow(&a), Argument::Borrow(&elsewhere)]]).unwrap_err();
    assert!(error.to_string().contains("is on device 0 instead of 5"), "{error}");
}

#[test]
fn bad_programs_are_errors_with_a_message() {
    let text = "module @bad { func.func public @main() -> tensor<2xf32> { return %x : tensor<2xf32> } }";
    let error = client().compile("bad", text, &CompileOptions::default()).unwrap_err();
    let Error::Pjrt(error) = error else { panic!("{error}") };
    assert_eq!(error.program.as_deref(), Some("bad"));
    assert!(error.to_string().starts_with("program `bad`: "), "{error}");
    assert!(error.message.contains("use of undeclared SSA value name"), "{error:?}");
    // Parsing errors have no code of their own; option errors do.
    let options =
        CompileOptions { xla_flags: vec![("xla_no_such_flag".into(), "1".into())], ..Default::default() };
    let error = client().compile("flagged", &add("2xf32"), &options).unwrap_err();
    let Error::Pjrt(error) = error else { panic!("{error}") };
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    assert!(error.message.contains("xla_no_such_flag"), "{error}");
}

#[test]
fn wrong_arguments_are_errors() {
    let executable = compile("add", &add("3xf32"));
    let a = floats(&[3], &[1.0; 3]);
    let wrong = floats(&[4], &[1.0; 4]);
    let error = executable.execute(vec![]).unwrap_err().to_string();
    assert!(error.contains("runs on 1 devices, but arguments are given for 0"), "{error}");
    // The plugin detects the other mistakes, some only when the results are needed.
    let check = |arguments: Vec<Argument<'_>>| {
        let result = executable.execute(vec![arguments]);
        let error = result.and_then(|execution| execution.outputs[0][0].to_host()).unwrap_err().to_string();
        assert!(error.contains("program `add`"), "{error}");
    };
    check(vec![Argument::Borrow(&a)]);
    check(vec![Argument::Borrow(&a), Argument::Borrow(&wrong)]);
    let other = Client::new(&plugin(), &ClientOptions::default()).unwrap();
    let foreign = Buffer::from_bytes(&other, 0, DType::F32, &[3], &[0; 12]).unwrap();
    let arguments = vec![Argument::Borrow(&a), Argument::Borrow(&foreign)];
    let error = executable.execute(vec![arguments]).unwrap_err().to_string();
    assert!(error.contains("belongs to another client"), "{error}");
}

#[test]
fn executables_survive_serialization() {
    let serialized = compile("increment", INCREMENT).program().serialize().unwrap();
    let other = Client::new(&plugin(), &ClientOptions { num_cpu_devices: 8, ..Default::default() }).unwrap();
    let executable = other.load_executable("loaded", &serialized).unwrap();
    assert_eq!((executable.name(), executable.num_outputs()), ("loaded", 1));
    let bytes = HostArray::zeros(DType::F32, &[1 << 20]);
    let a = Buffer::from_bytes(&other, 0, DType::F32, &[1 << 20], bytes.bytes()).unwrap();
    let b = run(&executable, vec![Argument::Donate(a)]).remove(0);
    assert_eq!(b.to_host().unwrap().as_slice::<f32>().unwrap()[9], 1.0);
    assert!(other.load_executable("junk", b"junk").unwrap_err().to_string().contains("program `junk`"));
}

#[test]
fn handles_keep_their_client() {
    let buffer = {
        let client = Client::new(&plugin(), &ClientOptions::default()).unwrap();
        let executable = client.compile("add", &add("2xf32"), &CompileOptions::default()).unwrap();
        let host = Arc::new(HostArray::from_slice(DType::F32, &[2], &[1.0_f32, 2.0]).unwrap());
        let a = Buffer::from_host(&client, 0, host).unwrap();
        run(&executable, vec![Argument::Borrow(&a), Argument::Borrow(&a)]).remove(0)
    };
    let pending = buffer.to_host_async().unwrap();
    drop(buffer);
    assert_eq!(pending.wait().unwrap().to_f64(), [2.0, 4.0]);
}

#[test]
fn handles_are_used_from_many_threads() {
    let executable = compile("add", &add("64xf32"));
    let a = floats(&[64], &[1.0; 64]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let sum = run(&executable, vec![Argument::Borrow(&a), Argument::Borrow(&a)]).remove(0);
                    assert_eq!(sum.to_host().unwrap().as_slice::<f32>().unwrap(), [2.0; 64]);
                }
            });
        }
    });
}

#[test]
fn flags_apply_to_one_program() {
    let directory = tempfile::tempdir().unwrap();
    let flag = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let dump_to = flag("xla_dump_to", directory.path().to_str().unwrap());
    let xla_flags = vec![dump_to, flag("xla_dump_hlo_as_text", "true")];
    let options = CompileOptions { xla_flags, ..CompileOptions::default() };
    client().compile("dumped", &add("2xf32"), &options).unwrap();
    let names: Vec<String> = std::fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert!(names.iter().any(|name| name.ends_with("after_optimizations.txt")), "{names:?}");
    let options =
        CompileOptions { xla_flags: vec![flag("xla_no_such_flag", "1")], ..CompileOptions::default() };
    let error = client().compile("flagged", &add("2xf32"), &options).unwrap_err();
    assert!(error.to_string().contains("xla_no_such_flag"), "{error}");
}

#[test]
fn the_optimized_program_and_its_cost_are_available() {
    let executable = compile("add", &add("16xf32"));
    let (format, bytes) = executable.program().optimized_program().unwrap();
    assert!(format.starts_with("hlo"), "{format}");
    assert!(!bytes.is_empty());
    let cost = executable.program().cost_analysis().unwrap();
    assert!(cost.iter().any(|(name, _)| name == "flops"), "{cost:?}");
}

#[test]
fn arrays_move_between_memories() {
    let a = floats(&[3], &[1.0, 2.0, 3.0]);
    let memories = client().device(0).unwrap().memories();
    for memory in memories {
        let moved = a.copy_to_memory(0, &memory.kind).unwrap();
        assert_eq!(moved.to_host().unwrap().to_f64(), [1.0, 2.0, 3.0]);
    }
    let error = a.copy_to_memory(0, "nowhere").unwrap_err().to_string();
    assert!(error.contains("has no memory `nowhere`"), "{error}");
}

#[test]
fn other_files_are_no_plugins() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("plugin.so");
    std::fs::write(&path, "not a library").unwrap();
    assert!(matches!(Plugin::load(&path).unwrap_err(), Error::Load { .. }));
    let missing = directory.path().join("missing.so");
    let error = find_or_install(Platform::Cpu, Some(&missing), &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::PluginPath { .. }) && error.is_user_error());
}
