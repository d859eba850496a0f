//! The built-in demo model: a small Llama-shaped checkpoint, trained to recall facts of the prompt and embedded in the
//! binary. `engine/models/demo/` contains the scripts that trained the model.

use baton_engine::model::ModelFiles;

/// The model's name in requests.
pub(crate) const NAME: &str = "baton-demo";

/// A question that shows what the model can do.
pub(crate) const QUESTION: &str = "Alice lives in Paris. Bob has a dog named Rex. The red box holds a key. Carol plays the violin. \
     What does the red box hold?";

macro_rules! file {
    ($name:literal) => {
        ($name, include_bytes!(concat!("../engine/models/demo/", $name)) as &[u8])
    };
}

static FILES: [(&str, &[u8]); 5] = [
    file!("config.json"),
    file!("generation_config.json"),
    file!("model.safetensors"),
    file!("tokenizer.json"),
    file!("tokenizer_config.json"),
];

pub(crate) fn model() -> ModelFiles {
    ModelFiles::BuiltIn { name: NAME, files: &FILES }
}
