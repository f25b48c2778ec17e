//! What `maxtext compile` refuses before anything is compiled.

use crate::{check_output, check_wrong};

#[track_caller]
fn check_refused(keys: &[&str], parts: &[&str]) {
    check_wrong(&[&["compile", "dataset_type=synthetic"], keys].concat(), parts);
}

#[test]
fn impossible_hardware_is_refused() {
    check_refused(
        &["compile_topology=v5p-130"],
        &["no hardware named `v5p-130`", "(command line)", "`v5p-128`"],
    );
    check_refused(&["compile_topology=v55p-128"], &["no hardware named `v55p-128`", "v5p"]);
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
        &["`ici_fsdp_parallelism=8` (command line)", "which is 4"],
    );
    check_refused(
        &["compile_topology=v5e-4", "compile_topology_num_slices=2", "dcn_data_parallelism=4"],
        &["`dcn_data_parallelism=4` (command line)"],
    );
    check_refused(&["compile_topology=v5e-4", "--program", "serve"], &["no program `serve`"]);
}

#[test]
fn help_has_examples() {
    check_output(&["compile", "--help"], &["compile_topology=v5p-128", "--program", "--json", "exit status"]);
}
