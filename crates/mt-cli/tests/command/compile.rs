//! Mistakes that `maxtext compile` refuses before it compiles anything.

use crate::{check_output, check_wrong, maxtext};

#[track_caller]
fn check_refused(keys: &[&str], fragments: &[&str]) {
    check_wrong(&[&["compile", "dataset_type=synthetic"], keys].concat(), fragments);
}

#[test]
fn impossible_hardware_is_refused() {
    check_refused(
        &["compile_topology=v5p-130"],
        &["no hardware named `v5p-130`", "(command line)", "`v5p-128`"],
    );
    check_refused(&["compile_topology=v55p-128"], &["no hardware named `v55p-128`", "v5p"]);
    check_refused(
        &["compile_topology=v5e:32x32"],
        &["no hardware named `v5e:32x32` (command line)", "1, 2, 4, 8 or 16", "`v5e-256`"],
    );
    check_refused(
        &["compile_topology=v5e:3x5"],
        &["no hardware named `v5e:3x5`", "1, 2, 4, 8 or 16", "`v5e-16`"],
    );
    check_refused(
        &["compile_topology=h100:16"],
        &["no hardware named `h100:16` (command line)", "one machine", "`h100-8`"],
    );
    check_refused(
        &["compile_topology=a3", "compile_topology_num_slices=2"],
        &["`compile_topology` is `a3` (command line), a machine of GPUs, and slices are of TPUs"],
    );
    check_refused(
        &["compile_topology=v5e-4", "compile_topology_num_slices=0"],
        &["`compile_topology_num_slices` is `0` (command line)", "leaves no device"],
    );
}

#[test]
fn meshes_and_batches_must_fit_the_hardware() {
    check_refused(
        &["compile_topology=v5e-4", "ici_fsdp_parallelism=8"],
        &[
            "`ici_fsdp_parallelism=8` (command line)",
            "which is 4",
            "; `compile_topology=v5e-8` has 8 devices",
        ],
    );
    check_refused(
        &["compile_topology=v5e-4", "dcn_data_parallelism=3"],
        &[
            "asks for several slices, but there is one",
            "; `compile_topology_num_slices=3` compiles for 3 slices",
        ],
    );
    check_refused(
        &["compile_topology=v5e-4", "num_cpu_slices=2"],
        &["`num_cpu_slices` is `2` (command line)", "`compile_topology_num_slices=2`"],
    );
    check_refused(
        &["compile_topology=v5e-4", "compile_topology_num_slices=2", "dcn_data_parallelism=4"],
        &["`dcn_data_parallelism=4` (command line)"],
    );
    check_refused(&["compile_topology=v5e-4", "--program", "serve"], &["no program `serve`"]);
}

#[test]
fn the_time_by_the_schedule_is_that_of_tpus() {
    let fragments =
        ["`--cycles`", "the compiler of TPUs", "the program is for `h100-8`", "compile_topology=v5e-4"];
    check_refused(&["compile_topology=h100-8", "--cycles"], &fragments);
    // This machine's devices are known once their plugin is loaded.
    let here = maxtext(&["compile", "dataset_type=synthetic", "--cycles"]);
    assert_eq!(here.status, 2, "{}", here.errors);
    assert!(here.errors.contains("the program is for this machine's cpu\nhint: "), "{}", here.errors);
}

#[test]
fn help_has_examples() {
    check_output(&["compile", "--help"], &["compile_topology=v5p-128", "--program", "--json", "exit status"]);
}
