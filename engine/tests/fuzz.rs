//! Replays the fuzzer's corpus: every file unchanged, and with some thousand reproducible changes.

use std::fs;
use std::path::Path;

use baton_engine::model::gguf;

#[test]
fn a_gguf_file_is_read_or_refused() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/gguf");
    let entries = fs::read_dir(&folder).expect("the corpus is there");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    assert!(files.len() >= 3);
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).expect("a file")).collect();
    for (file, bytes) in files.iter().zip(&corpus) {
        assert!(gguf::check(bytes), "{} is a model", file.display());
    }
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |end: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % end.max(1)
    };
    for number in 0..5_000 {
        let mut bytes = corpus[number % corpus.len()].clone();
        for _ in 0..1 + below(4) {
            // Most of a file is data, which has no structure.
            let at = below(bytes.len().min(1500));
            match below(4) {
                0 if !bytes.is_empty() => bytes[at] = below(256) as u8,
                1 if !bytes.is_empty() => drop(bytes.remove(at)),
                2 => bytes.insert(at, below(256) as u8),
                _ => bytes.truncate(at),
            }
        }
        // Either result is right.
        let _model = gguf::check(&bytes);
    }
}
