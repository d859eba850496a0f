//! The Qwen 2 of the fixtures with its bf16 weights widened to f32, so that all three families are in f32.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::harness::cluster::QWEN2;

/// The folder of the checkpoint, as a model's name for `options`.
pub(crate) fn qwen2_in_f32() -> &'static str {
    static MADE: OnceLock<(tempfile::TempDir, String)> = OnceLock::new();
    let (_, path) = MADE.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        make(folder.path());
        let path = folder.path().to_str().expect("UTF-8").to_owned();
        (folder, path)
    });
    path
}

fn make(folder: &Path) {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(QWEN2);
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::copy(fixture.join(file), folder.join(file)).expect("a file of the fixture");
    }
    let config = fs::read_to_string(fixture.join("config.json")).expect("a file of the fixture");
    fs::write(folder.join("config.json"), config.replace("bfloat16", "float32")).expect("written");
    let mut wide = Vec::new();
    for entry in fs::read_dir(&fixture).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        if entry.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = fs::read(&entry).expect("a file of the fixture");
            for (name, tensor) in SafeTensors::deserialize(&bytes).expect("a checkpoint").iter() {
                assert_eq!(tensor.dtype(), Dtype::BF16, "{name}");
                let halves = tensor.data().chunks_exact(2);
                let values: Vec<u8> = halves.flat_map(|half| [0, 0, half[0], half[1]]).collect();
                wide.push((name.to_owned(), tensor.shape().to_vec(), values));
            }
        }
    }
    let views = wide.iter().map(|(name, shape, values)| {
        (name, TensorView::new(Dtype::F32, shape.clone(), values).expect("its values"))
    });
    let file = safetensors::serialize(views, None).expect("tensors");
    fs::write(folder.join("model.safetensors"), file).expect("written");
}
