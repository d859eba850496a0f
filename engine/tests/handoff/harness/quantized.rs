//! Checkpoints whose projections are quantized: the Llama of the fixtures with matrices of generated integers or floats.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::harness::cluster::LLAMA;

/// Inputs that share a scale.
const GROUP: usize = 32;
/// 2⁻⁵ in f16.
const SCALE: [u8; 2] = 0x2800_u16.to_le_bytes();

/// A format of quantized matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Format {
    Gptq,
    Awq,
    Packed,
    Fp8,
}

/// A tensor of a checkpoint.
type Part = (String, Dtype, Vec<usize>, Vec<u8>);

impl Format {
    pub(crate) const ALL: [Self; 4] = [Self::Gptq, Self::Awq, Self::Packed, Self::Fp8];

    /// The folder of the checkpoint, as a model's name for `options`.
    pub(crate) fn checkpoint(self) -> &'static str {
        static MADE: [OnceLock<(tempfile::TempDir, String)>; 4] = [const { OnceLock::new() }; 4];
        let (_, path) = MADE[self as usize].get_or_init(|| {
            let folder = tempfile::tempdir().expect("a temporary folder");
            self.make(folder.path());
            let path = folder.path().to_str().expect("UTF-8").to_owned();
            (folder, path)
        });
        path
    }

    fn config(self) -> Value {
        let group = json!({"weights": {
            "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": GROUP
        }});
        match self {
            Self::Gptq => json!({"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
            Self::Awq => {
                json!({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": true})
            }
            Self::Packed => json!({
                "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"0": group}
            }),
            Self::Fp8 => json!({"quant_method": "fp8", "fmt": "e4m3"}),
        }
    }

    /// The tensors of a matrix of `rows` outputs by `columns` inputs.
    fn parts(self, prefix: &str, rows: usize, columns: usize) -> Vec<Part> {
        let groups = columns / GROUP;
        let part = |name: &str, dtype, shape: &[usize], bytes| {
            (format!("{prefix}{name}"), dtype, shape.to_vec(), bytes)
        };
        let random = |bytes| generated(prefix, bytes);
        let scales = || SCALE.repeat(rows * groups);
        let quants = rows * columns / 2;
        match self {
            Self::Gptq => vec![
                part("qweight", Dtype::I32, &[columns / 8, rows], random(quants)),
                // Stored minus one: each zero point is 8.
                part("qzeros", Dtype::I32, &[groups, rows / 8], vec![0x77; groups * rows / 2]),
                part("scales", Dtype::F16, &[groups, rows], scales()),
            ],
            Self::Awq => vec![
                part("qweight", Dtype::I32, &[columns, rows / 8], random(quants)),
                part("qzeros", Dtype::I32, &[groups, rows / 8], vec![0x88; groups * rows / 2]),
                part("scales", Dtype::F16, &[groups, rows], scales()),
            ],
            Self::Packed => vec![
                part("weight_packed", Dtype::I32, &[rows, columns / 8], random(quants)),
                part("weight_scale", Dtype::F16, &[rows, groups], scales()),
            ],
            Self::Fp8 => {
                // Below 2, so that there is no infinity and no NaN.
                let values = random(rows * columns).into_iter().map(|byte| byte & 0xbf).collect();
                vec![
                    part("weight", Dtype::F8_E4M3, &[rows, columns], values),
                    part("weight_scale", Dtype::F32, &[1], 0.25_f32.to_le_bytes().to_vec()),
                ]
            }
        }
    }

    fn make(self, folder: &Path) {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(LLAMA);
        for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            fs::copy(fixture.join(file), folder.join(file)).expect("a file of the fixture");
        }
        let config = fs::read(fixture.join("config.json")).expect("a file of the fixture");
        let mut config: Value = serde_json::from_slice(&config).expect("JSON");
        config["quantization_config"] = self.config();
        fs::write(folder.join("config.json"), config.to_string()).expect("written");
        let bytes = fs::read(fixture.join("model.safetensors")).expect("a file of the fixture");
        let mut all: Vec<Part> = Vec::new();
        for (name, tensor) in SafeTensors::deserialize(&bytes).expect("a checkpoint").iter() {
            match (name.strip_suffix("_proj.weight"), tensor.shape()) {
                (Some(prefix), &[rows, columns]) => {
                    all.extend(self.parts(&format!("{prefix}_proj."), rows, columns));
                }
                _ => all.push((
                    name.to_owned(),
                    tensor.dtype(),
                    tensor.shape().to_vec(),
                    tensor.data().to_vec(),
                )),
            }
        }
        let views = all.iter().map(|(name, dtype, shape, bytes)| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).expect("its values"))
        });
        let file = safetensors::serialize(views, None).expect("tensors");
        fs::write(folder.join("model.safetensors"), file).expect("written");
    }
}

/// Bytes that follow from a name.
fn generated(name: &str, count: usize) -> Vec<u8> {
    let seed = name.bytes().fold(7_u64, |seed, byte| (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 33) as u8
    };
    (0..count).map(|_| next()).collect()
}
