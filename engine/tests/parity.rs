//! The engine against recorded outputs of `transformers` on tiny checkpoints of all families.
//!
//! `fixtures/` is a subset of what the oracle makes (see `fixtures/README.md`); set `BATON_PARITY_DIR` to run
//! against a full set as well.

use std::path::{Path, PathBuf};

use baton_engine::executor::cuda::{Accelerator, DeviceChoice};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn holds(dir: &Path, device: DeviceChoice) {
    let mut lines = Vec::new();
    let report = baton_engine::parity::run(dir, device, &mut lines).expect("the folder is complete");
    let text = String::from_utf8(lines).expect("the report is text");
    // Shown with --nocapture.
    eprintln!("{text}");
    assert!(report.passed > 0 && report.failed == 0, "{text}");
}

#[test]
fn the_engine_computes_what_transformers_computes() {
    holds(&fixtures(), DeviceChoice::Cpu);
}

#[test]
fn what_a_gpu_is_asked_to_do_computes_it_too() {
    holds(&fixtures(), DeviceChoice::Accelerator(Accelerator::Software));
}

#[test]
fn nothing_is_said_to_hold_on_a_device_that_is_not_there() {
    // No machine has as many; most that run this have none, nor a driver.
    let absent = DeviceChoice::Accelerator(Accelerator::Cuda(4_000));
    let mut lines = Vec::new();
    assert!(baton_engine::parity::run(&fixtures(), absent, &mut lines).is_err());
    assert_eq!(String::from_utf8_lossy(&lines), "");
}

#[test]
fn a_full_set_holds_where_one_is_given() {
    if let Some(dir) = std::env::var_os("BATON_PARITY_DIR") {
        holds(Path::new(&dir), DeviceChoice::Cpu);
    }
}
