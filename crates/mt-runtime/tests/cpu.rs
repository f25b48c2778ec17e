//! Programs, arrays and the cache on the CPU plugin.

use std::{fs, path::Path, sync::Arc};

use mt_ir::{Memory, Program, ProgramValue, TensorType};
use mt_runtime::{
    Array, CompileSettings, Executable, Input, Platform, Resharding, Runtime, RuntimeError, RuntimeOptions,
    testing,
};
use mt_shape::{DType, HostArray, Mesh, PartitionSpec, Sharding};

fn value(name: &str, ty: &TensorType, sharding: &Sharding, donated: bool) -> ProgramValue {
    ProgramValue {
        name: name.into(),
        ty: ty.clone(),
        sharding: sharding.clone(),
        donated,
        memory: Memory::Device,
    }
}

fn single(rank: usize) -> Sharding {
    Sharding::replicated(Arc::new(Mesh::single()), rank)
}

fn iota(dtype: DType, dims: &[usize]) -> HostArray {
    let mut host = HostArray::zeros(dtype, dims);
    let size = dtype.byte_size();
    for (index, element) in host.bytes_mut().chunks_exact_mut(size).enumerate() {
        match dtype {
            DType::F32 => element.copy_from_slice(&(index as f32).to_le_bytes()),
            _ => element[0] = (index % 2) as u8,
        }
    }
    host
}

/// `weights + gradient` with donated weights, and a constant that distinguishes the programs of different tests.
fn update(dims: &[usize], constant: u32) -> Program {
    let ty = TensorType::new(DType::F32, dims);
    let shape: String = dims.iter().map(|size| format!("{size}x")).collect();
    let text = format!(
        "module @update {{ func.func public @main(
             %w: tensor<{shape}f32> {{tf.aliasing_output = 0 : i32}}, %g: tensor<{shape}f32>) -> tensor<{shape}f32> {{
           %c = stablehlo.constant dense<{constant}.0> : tensor<{shape}f32>
           %s = stablehlo.add %w, %g : tensor<{shape}f32>
           %r = stablehlo.add %s, %c : tensor<{shape}f32>
           return %r : tensor<{shape}f32> }} }}"
    );
    let sharding = single(dims.len());
    Program {
        name: "update".into(),
        text,
        mesh: sharding.mesh.clone(),
        inputs: vec![value("weights", &ty, &sharding, true), value("gradient", &ty, &sharding, false)],
        outputs: vec![value("weights", &ty, &sharding, false)],
        temporaries: Vec::new(),
        counts: mt_ir::Counts::default(),
        notes: Vec::new(),
    }
}

fn compile(runtime: &Runtime, program: &Program) -> Executable {
    runtime.compile(program, &CompileSettings::default()).unwrap()
}

fn place(host: &HostArray) -> Array {
    Array::from_host(testing::cpu(1), host, &single(host.dims().len())).unwrap()
}

fn runtime_with_cache(directory: &Path) -> Runtime {
    let options = RuntimeOptions {
        platform: Some(Platform::Cpu),
        num_cpu_devices: Some(1),
        cache_directory: Some(directory.into()),
        ..RuntimeOptions::default()
    };
    Runtime::new(&options, &mut |_| {}).unwrap()
}

fn check_update(runtime: &Runtime, executable: &Executable, constant: f64) {
    let host = iota(DType::F32, &[4]);
    let place = || Array::from_host(runtime, &host, &single(1)).unwrap();
    let gradient = place();
    let results = executable.run(vec![place().into(), (&gradient).into()]).unwrap();
    let expected: Vec<f64> = (0..4).map(|index| 2.0 * f64::from(index) + constant).collect();
    assert_eq!(results[0].to_host().unwrap().to_f64(), expected);
}

#[test]
fn the_second_compilation_is_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let program = update(&[4], 1);
    let first = runtime_with_cache(directory.path());
    let executable = compile(&first, &program);
    assert!(!executable.is_cached());
    check_update(&first, &executable, 1.0);
    let memory = executable.memory().unwrap();
    // Another runtime, as in another process.
    let second = runtime_with_cache(directory.path());
    let loaded = compile(&second, &program);
    assert!(loaded.is_cached());
    check_update(&second, &loaded, 1.0);
    assert_eq!(loaded.memory().unwrap(), memory);
    assert!(!compile(&second, &update(&[4], 2)).is_cached(), "another program");
    let flags = vec![("xla_cpu_enable_fast_math".to_owned(), "false".to_owned())];
    let settings = CompileSettings { xla_flags: flags, ..CompileSettings::default() };
    assert!(!second.compile(&program, &settings).unwrap().is_cached(), "other flags");
}

#[test]
fn damaged_entries_are_compiled_again() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = runtime_with_cache(directory.path());
    let program = update(&[4], 3);
    compile(&runtime, &program);
    let entry = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|extension| extension == "executable"))
        .unwrap();
    let mut bytes = fs::read(&entry).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&entry, &bytes).unwrap();
    let executable = compile(&runtime, &program);
    assert!(!executable.is_cached());
    check_update(&runtime, &executable, 3.0);
    assert!(compile(&runtime, &program).is_cached(), "it was written anew");
}

#[test]
fn the_cache_can_be_turned_off() {
    let runtime = runtime_with_cache(Path::new(""));
    let program = update(&[4], 4);
    compile(&runtime, &program);
    assert!(!compile(&runtime, &program).is_cached());
}

#[test]
fn wrong_arguments_are_named() {
    let runtime = testing::cpu(1);
    let executable = compile(runtime, &update(&[4], 1));
    let check = |inputs: Vec<Input<'_>>, expected: &str| {
        let error = executable.run(inputs).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(!error.is_user_error());
    };
    let right = || place(&iota(DType::F32, &[4]));
    let (gradient, short) = (right(), place(&iota(DType::F32, &[3])));
    check(vec![right().into()], "program `update` takes 2 arguments, but 1 are given");
    check(
        vec![right().into(), (&short).into()],
        "argument `gradient` of program `update` is `float32[3]`, but `float32[4]` is needed",
    );
    let integers = place(&HostArray::zeros(DType::I32, &[4]));
    check(vec![integers.into(), (&gradient).into()], "argument `weights` of program `update` is `int32[4]`");
    check(vec![(&gradient).into(), (&gradient).into()], "argument `weights` of program `update` is donated");
    let mesh = Arc::new(Mesh::new([("data".to_owned(), 2)]).unwrap());
    let spec = PartitionSpec(vec![vec!["data".into()]]);
    let split = Array::from_host(testing::cpu(8), &iota(DType::F32, &[4]), &Sharding { mesh, spec }).unwrap();
    check(
        vec![right().into(), (&split).into()],
        "argument `gradient` of program `update` has sharding `(data)` on `data=2`, but `one device` is needed",
    );
    // The caller may give up an array that the program does not donate.
    assert!(executable.run(vec![right().into(), right().into()]).is_ok());
}

#[test]
fn arrays_are_split_and_assembled() {
    let runtime = testing::cpu(8);
    let axes = [("data".to_owned(), 2), ("fsdp".to_owned(), 2), ("tensor".to_owned(), 2)];
    let mesh = Arc::new(Mesh::new(axes).unwrap());
    let check = |dims: &[usize], spec: &[&[&str]], num_shards: usize| {
        let spec = spec.iter().map(|axes| axes.iter().map(|axis| (*axis).to_owned()).collect()).collect();
        let sharding = Sharding { mesh: mesh.clone(), spec: PartitionSpec(spec) };
        for dtype in [DType::F32, DType::Bool] {
            let host = iota(dtype, dims);
            let array = Array::from_host(runtime, &host, &sharding).unwrap();
            assert_eq!(array.to_host().unwrap(), host, "{dims:?}");
            assert_eq!(array.shards().len(), num_shards);
            assert_eq!(array.bytes_on_device(7), host.bytes().len() / num_shards);
            assert_eq!(array.bytes_on_device(8), 0);
            assert_eq!(array.shard_to_host(5).unwrap().dims(), sharding.shard_dims(dims));
            let shared = Array::from_shared(runtime, Arc::new(host.clone()), &sharding).unwrap();
            assert_eq!(shared.to_host().unwrap(), host);
            let mut num_read = 0;
            let read = |ranges: &[std::ops::Range<usize>]| {
                num_read += 1;
                let shard = array.shards().into_iter().find(|shard| shard.ranges == ranges).unwrap();
                array.shard_to_host(shard.device)
            };
            let again = Array::from_shards::<RuntimeError>(runtime, array.ty(), &sharding, read).unwrap();
            assert_eq!(again.to_host().unwrap(), host);
            assert_eq!(num_read, num_shards);
        }
    };
    check(&[], &[], 1);
    check(&[3, 5], &[&[], &[]], 1);
    check(&[4, 5], &[&["fsdp"], &[]], 2);
    check(&[4, 8, 3], &[&["tensor"][..], &["data", "fsdp"], &[]], 8);
    check(&[8, 2], &[&["fsdp", "tensor", "data"], &[]], 8);
}

#[test]
fn arrays_split_along_their_leading_dimension_share_host_memory() {
    let mesh = Arc::new(Mesh::new([("a".to_owned(), 4), ("b".to_owned(), 2)]).unwrap());
    let check = |dims: &[usize], spec: &[&[&str]], is_shared: bool| {
        let spec = spec.iter().map(|axes| axes.iter().map(|axis| (*axis).to_owned()).collect()).collect();
        let sharding = Sharding { mesh: mesh.clone(), spec: PartitionSpec(spec) };
        let host = Arc::new(iota(DType::F32, dims));
        let array = Array::from_shared(testing::cpu(8), host.clone(), &sharding).unwrap();
        assert_eq!(Arc::strong_count(&host), if is_shared { 9 } else { 1 }, "{dims:?}");
        assert_eq!(array.to_host().unwrap(), *host);
    };
    check(&[8, 16], &[&[], &[]], true);
    check(&[8, 16], &[&["a", "b"], &[]], true);
    check(&[8, 16], &[&["a"], &[]], true);
    check(&[1, 4, 16], &[&[], &["a"], &[]], true);
    check(&[8, 16], &[&[], &["a"]], false);
}

#[test]
fn splits_that_do_not_fit_are_refused() {
    let mesh = Arc::new(Mesh::new([("a".to_owned(), 2)]).unwrap());
    let check = |spec: &[&[&str]], expected: &str| {
        let spec = spec.iter().map(|axes| axes.iter().map(|axis| (*axis).to_owned()).collect()).collect();
        let sharding = Sharding { mesh: mesh.clone(), spec: PartitionSpec(spec) };
        let error = Array::from_host(testing::cpu(8), &iota(DType::F32, &[3, 4]), &sharding).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    check(&[&["a"], &[]], "dimension 0 of size 3 cannot be split into 2 equal shards");
    check(&[&[], &["b"]], "the mesh has no axis `b`");
    check(&[&["a"]], "it has 2 dimensions, the specification 1");
    check(&[&["a"], &["a"]], "dimension 0");
    let ty = TensorType::new(DType::F32, [4]);
    let wrong = |_: &[std::ops::Range<usize>]| Ok(iota(DType::F32, &[4]));
    let sharding = Sharding { mesh, spec: PartitionSpec(vec![vec!["a".into()]]) };
    let error = Array::from_shards::<RuntimeError>(testing::cpu(8), &ty, &sharding, wrong).unwrap_err();
    assert!(error.to_string().contains("its slice [0..2] was given as `float32[4]`"), "{error}");
}

/// The gradient step of [`update`] over 8 devices, with the mean of the weights as a second result.
fn sharded_update() -> Program {
    let mesh = Arc::new(Mesh::new([("fsdp".to_owned(), 8)]).unwrap());
    let rows = Sharding { mesh: mesh.clone(), spec: PartitionSpec(vec![vec!["fsdp".into()], vec![]]) };
    let ty = TensorType::new(DType::F32, [16, 3]);
    let text = r#"module @sharded_update {
      sdy.mesh @mesh = <["fsdp"=8]>
      func.func public @main(
          %w: tensor<16x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"fsdp"}, {}]>, tf.aliasing_output = 0 : i32},
          %g: tensor<16x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"fsdp"}, {}]>})
          -> (tensor<16x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"fsdp"}, {}]>},
              tensor<f32> {sdy.sharding = #sdy.sharding<@mesh, []>}) {
        %r = stablehlo.add %w, %g : tensor<16x3xf32>
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        %sum = stablehlo.reduce(%r init: %zero) applies stablehlo.add across dimensions = [0, 1]
          : (tensor<16x3xf32>, tensor<f32>) -> tensor<f32>
        return %r, %sum : tensor<16x3xf32>, tensor<f32> } }"#;
    Program {
        name: "sharded_update".into(),
        text: text.into(),
        inputs: vec![value("weights", &ty, &rows, true), value("gradient", &ty, &rows, false)],
        outputs: vec![
            value("weights", &ty, &rows, false),
            value("sum", &TensorType::scalar(DType::F32), &Sharding::replicated(mesh.clone(), 0), false),
        ],
        temporaries: Vec::new(),
        counts: mt_ir::Counts::default(),
        notes: Vec::new(),
        mesh,
    }
}

#[test]
fn eight_devices_train_together() {
    let runtime = testing::cpu(8);
    let program = sharded_update();
    // Twice: first compiled, or loaded from an earlier run of the test, then certainly loaded.
    for _ in 0..2 {
        let executable = compile(runtime, &program);
        let sharding = &program.inputs[0].sharding;
        let host = iota(DType::F32, &[16, 3]);
        let gradient = Array::from_host(runtime, &host, sharding).unwrap();
        let mut weights = Array::from_host(runtime, &host, sharding).unwrap();
        assert_eq!(weights.bytes_on_device(0), 2 * 3 * 4);
        let mut sum = None;
        for _ in 0..3 {
            let mut results = executable.run(vec![weights.into(), (&gradient).into()]).unwrap();
            sum = results.pop();
            weights = results.remove(0);
        }
        let expected: Vec<f64> = (0..48).map(|index| 4.0 * f64::from(index)).collect();
        assert_eq!(weights.to_host().unwrap().to_f64(), expected);
        let sum = sum.unwrap();
        assert_eq!(sum.to_host().unwrap().to_f64(), [expected.iter().sum::<f64>()]);
        assert_eq!(sum.shards().len(), 1);
        assert_eq!(weights.bytes_on_device(3), 2 * 3 * 4);
    }
}

#[test]
fn programs_need_their_devices_and_declare_their_results() {
    let error = testing::cpu(1).compile(&sharded_update(), &CompileSettings::default()).unwrap_err();
    assert!(error.is_user_error());
    assert!(error.to_string().contains("runs on 8 devices, but there are 1\nhint: "), "{error}");

    let mut program = update(&[4], 5);
    program.outputs[0].ty = TensorType::new(DType::F32, [2, 2]);
    program.outputs[0].sharding = single(2);
    let executable = compile(testing::cpu(1), &program);
    let host = iota(DType::F32, &[4]);
    let error = executable.run(vec![place(&host).into(), place(&host).into()]).unwrap_err().to_string();
    assert!(error.contains("result `weights` of program `update` is `float32[4]`"), "{error}");
    program.outputs.clear();
    let error = testing::cpu(1).compile(&program, &CompileSettings::default()).unwrap_err().to_string();
    assert!(error.contains("returned 1 results, but declares 0"), "{error}");
}

#[test]
fn programs_are_dumped() {
    let directory = tempfile::tempdir().unwrap();
    let settings =
        CompileSettings { dump_to: Some(directory.path().join("dump")), ..CompileSettings::default() };
    let program = update(&[4], 6);
    for _ in 0..2 {
        let executable = testing::cpu(1).compile(&program, &settings).unwrap();
        assert!(!executable.is_cached());
    }
    let read = |name: &str| fs::read_to_string(directory.path().join("dump").join(name)).unwrap();
    assert_eq!(read("update.stablehlo.mlir"), program.text);
    assert!(read("update.optimized.hlo").contains("ENTRY"));
}

#[test]
fn memory_is_checked_before_the_first_step() {
    let runtime = testing::cpu(8);
    runtime.check_memory(&[&compile(runtime, &sharded_update())], "").unwrap();
    // 64 TiB of weights, which no test machine has; compiling needs none of it.
    let program = update(&[1 << 22, 1 << 22], 7);
    let executable = compile(testing::cpu(1), &program);
    let memory = executable.memory().unwrap();
    assert_eq!((memory.arguments, memory.aliased), (128 << 40, 64 << 40));
    let error = testing::cpu(1).check_memory(&[&executable], "train less").unwrap_err();
    assert!(error.is_user_error());
    let text = error.to_string();
    assert!(text.starts_with("program `update` needs 128.0 TiB of memory, but "), "{text}");
    assert!(text.contains("`weights` float32[4194304, 4194304]: 64.0 TiB\n  `gradient`"), "{text}");
    assert!(text.ends_with("\nhint: train less"), "{text}");
}

#[test]
fn live_arrays_are_counted() {
    let runtime = runtime_with_cache(Path::new(""));
    let array = Array::from_host(&runtime, &iota(DType::F32, &[5]), &single(1)).unwrap();
    assert_eq!(runtime.live_bytes(), 20);
    let pending = array.to_host_async().unwrap();
    drop(array);
    assert_eq!(runtime.live_bytes(), 0);
    assert_eq!(pending.wait().unwrap(), iota(DType::F32, &[5]));
}

#[test]
fn a_program_runs_from_host_to_host() {
    let host = iota(DType::F32, &[4]);
    let results = testing::run(&update(&[4], 1), &[host.clone(), host.clone()]).unwrap();
    assert_eq!(results[0].to_f64(), [1.0, 3.0, 5.0, 7.0]);
    let error = testing::run(&update(&[4], 1), &[host.clone(), host.clone(), host]).unwrap_err();
    assert!(matches!(error, RuntimeError::ArgumentCount { needed: 2, given: 3, .. }), "{error}");
}

#[test]
fn many_threads_compile_and_run_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = runtime_with_cache(directory.path());
    std::thread::scope(|scope| {
        for constant in [8, 8, 9, 9] {
            let runtime = &runtime;
            scope.spawn(move || {
                check_update(runtime, &compile(runtime, &update(&[4], constant)), f64::from(constant));
            });
        }
    });
}

/// A chain of `length` products of a matrix with itself and additions.
fn chain(dtype: DType, size: usize, length: usize) -> Program {
    let ty = TensorType::new(dtype, [size, size]);
    let (operand, result) =
        (format!("tensor<{size}x{size}x{}>", dtype.stablehlo()), format!("tensor<{size}x{size}xf32>"));
    let mut text = format!("module @chain {{ func.func public @main(%a: {operand}) -> {result} {{\n");
    text += &format!(
        "%v0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0] : ({operand}, {operand}) -> {result}\n"
    );
    for index in 0..length {
        text += &format!("%s{index} = stablehlo.sine %v{index} : {result}\n");
        text += &format!("%v{} = stablehlo.add %s{index}, %v{index} : {result}\n", index + 1);
    }
    text += &format!("return %v{length} : {result} }} }}");
    let sharding = single(2);
    Program {
        name: "chain".into(),
        text,
        mesh: sharding.mesh.clone(),
        inputs: vec![value("a", &ty, &sharding, false)],
        outputs: vec![value("r", &TensorType::new(DType::F32, [size, size]), &sharding, false)],
        temporaries: Vec::new(),
        counts: mt_ir::Counts::default(),
        notes: Vec::new(),
    }
}

/// Whether Linux lists instructions that multiply `bf16` among the processor's features.
fn has_bf16_instructions() -> bool {
    let features = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    features.contains("avx512_bf16") || features.contains("amx_bf16")
}

#[test]
fn loaded_programs_compute_the_same_bits() {
    let fusion = ("xla_cpu_experimental_xnn_fusion_type".to_owned(), "LIBRARY_FUSION_TYPE_DOT".to_owned());
    // The plugin cannot serialize programs with these fusions, so they are compiled each time. It has fusions of this
    // type only on processors with instructions for it.
    let fuses = has_bf16_instructions();
    let cases =
        [(DType::F32, vec![], true), (DType::BF16, vec![], true), (DType::BF16, vec![fusion], !fuses)];
    for (dtype, xla_flags, is_serializable) in cases {
        let directory = tempfile::tempdir().unwrap();
        let settings = CompileSettings { xla_flags, ..CompileSettings::default() };
        let mut host = HostArray::zeros(dtype, &[384, 384]);
        // Bytes that are small numbers in either type.
        host.bytes_mut().iter_mut().enumerate().for_each(|(index, byte)| *byte = ((index * 37) % 61) as u8);
        let results = [false, true].map(|is_second| {
            let runtime = runtime_with_cache(directory.path());
            let executable = runtime.compile(&chain(dtype, 384, 2), &settings).unwrap();
            assert_eq!(executable.is_cached(), is_second && is_serializable);
            let array = Array::from_host(&runtime, &host, &single(2)).unwrap();
            executable.run(vec![array.into()]).unwrap()[0].to_host().unwrap()
        });
        assert_eq!(results[0], results[1]);
    }
}

#[test]
fn collectives_of_loops_are_counted_with_their_turns() {
    let mesh = Arc::new(Mesh::new([("x".to_owned(), 8)]).unwrap());
    let split = Sharding { mesh: mesh.clone(), spec: PartitionSpec(vec![vec![], vec!["x".into()]]) };
    let ty = TensorType::new(DType::F32, [16, 16]);
    // Products over the split dimension of a value that stays split along it: five reductions, and one all-gather at
    // the end.
    let text = r#"module @loop { sdy.mesh @mesh = <["x"=8]>
        func.func public @main(%a: tensor<16x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>})
            -> (tensor<16x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
          %zero = stablehlo.constant dense<0> : tensor<i32>
          %one = stablehlo.constant dense<1> : tensor<i32>
          %five = stablehlo.constant dense<5> : tensor<i32>
          %r:2 = stablehlo.while(%i = %zero, %x = %a) : tensor<i32>, tensor<16x16xf32>
            cond {
              %c = stablehlo.compare LT, %i, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
              stablehlo.return %c : tensor<i1>
            } do {
              %p = stablehlo.dot_general %x, %x, contracting_dims = [1] x [1]
                : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
              %s = sdy.sharding_constraint %p <@mesh, [{}, {"x"}]> : tensor<16x16xf32>
              %n = stablehlo.add %i, %one : tensor<i32>
              stablehlo.return %n, %s : tensor<i32>, tensor<16x16xf32>
            }
          return %r#1 : tensor<16x16xf32> } }"#;
    let program = Program {
        name: "loop".into(),
        text: text.into(),
        mesh: mesh.clone(),
        inputs: vec![value("a", &ty, &split, false)],
        outputs: vec![value("r", &ty, &Sharding::replicated(mesh, 2), false)],
        temporaries: Vec::new(),
        counts: mt_ir::Counts::default(),
        notes: Vec::new(),
    };
    let collectives = compile(testing::cpu(8), &program).collectives().unwrap();
    let of_kind = |kind: &str| -> Vec<(u64, u64)> {
        let alike = collectives.iter().filter(|collective| collective.kind == kind);
        alike.map(|collective| (collective.bytes, collective.times)).collect()
    };
    assert_eq!(of_kind("all-reduce"), [(1024, 5)], "{collectives:#?}");
    assert_eq!(of_kind("all-gather"), [(1024, 1)], "{collectives:#?}");
}

#[test]
fn arrays_move_between_meshes_on_the_devices() {
    let runtime = testing::cpu(8);
    let mesh = |axes: &[(&str, usize)], first: usize| {
        let axes = axes.iter().map(|(name, size)| ((*name).to_owned(), *size));
        Arc::new(Mesh::new(axes).unwrap().beginning_at(first))
    };
    let split = |mesh: &Arc<Mesh>, spec: &[&[&str]]| {
        let spec = spec.iter().map(|axes| axes.iter().map(|axis| (*axis).to_owned()).collect()).collect();
        Sharding { mesh: mesh.clone(), spec: PartitionSpec(spec) }
    };
    let trainer = mesh(&[("fsdp", 4)], 0);
    let like = mesh(&[("tensor", 4)], 4);
    let other = mesh(&[("data", 2), ("tensor", 2)], 4);
    let (small, one) = (mesh(&[("data", 2)], 6), mesh(&[], 3));
    let moves: [(&[&[&str]], Sharding); 6] = [
        (&[&["fsdp"], &[]], split(&like, &[&["tensor"], &[]])),
        (&[&["fsdp"], &[]], split(&other, &[&[], &["tensor"]])),
        (&[&["fsdp"], &[]], split(&small, &[&[], &[]])),
        (&[&[], &["fsdp"]], split(&one, &[&[], &[]])),
        (&[&[], &[]], split(&other, &[&["data"], &["tensor"]])),
        (&[&[], &["fsdp"]], split(&trainer, &[&["fsdp"], &[]])),
    ];
    let host = iota(DType::F32, &[8, 12]);
    for (from, to) in moves {
        let from = split(&trainer, from);
        let array = Array::from_host(runtime, &host, &from).unwrap();
        let described = [(array.ty().clone(), from.clone()), (array.ty().clone(), from)];
        let both = [to.clone(), to.clone()];
        let settings = CompileSettings::default();
        let resharding = Resharding::new(runtime, &described, &both, Some(1), &settings).unwrap();
        let again = Array::from_host(runtime, &host, array.sharding()).unwrap();
        let moved = resharding.run(&[array, again]).unwrap();
        for moved in moved {
            assert_eq!(moved.sharding(), &to);
            assert_eq!(moved.to_host().unwrap(), host, "to {}", to.spec);
            for place in 0..to.mesh.num_devices() {
                let own = moved.shard_to_host(place).unwrap();
                assert_eq!(own.dims(), to.shard_dims(&[8, 12]), "to {}", to.spec);
            }
        }
    }
}
