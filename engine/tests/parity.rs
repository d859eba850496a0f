//! The engine against recorded outputs of `transformers` on tiny checkpoints of all families.
//!
//! `fixtures/` is a subset of what the oracle makes (see `fixtures/README.md`); set `BATON_PARITY_DIR` to run
//! against a full set as well.

use std::path::Path;

fn holds(dir: &Path) {
    let mut lines = Vec::new();
    let report = baton_engine::parity::run(dir, &mut lines).expect("the folder is complete");
    let text = String::from_utf8(lines).expect("the report is text");
    // Shown with --nocapture.
    eprintln!("{text}");
    assert!(report.passed > 0 && report.failed == 0, "{text}");
}

#[test]
fn the_engine_computes_what_transformers_computes() {
    holds(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures"));
}

#[test]
fn a_full_set_holds_where_one_is_given() {
    if let Some(dir) = std::env::var_os("BATON_PARITY_DIR") {
        holds(Path::new(&dir));
    }
}
