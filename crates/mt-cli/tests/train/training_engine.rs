//! The example that drives a trainer batch by batch.

#[path = "../../examples/training_engine.rs"]
mod example;

#[test]
fn a_trainer_is_driven_batch_by_batch() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap().to_owned();
    let loss = example::run([path, "steps=40".to_owned()].into_iter()).unwrap();
    // Even predictions have a loss of ln 64, 4.16.
    assert!(loss < 1.0, "{loss}");
    // The checkpoint of the last step, counted from 0.
    assert!(directory.path().join("checkpoints/39").is_dir());
}
