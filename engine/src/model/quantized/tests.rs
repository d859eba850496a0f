//! Quantized matrices: values of every format, and formats and parts that are refused.

use std::path::Path;

use safetensors::SafeTensors;
use serde_json::json;

use super::*;
use crate::model::ModelFiles;
use crate::model::weights::Weights;

#[test]
fn every_format_reads_as_its_own_tools_read_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantized");
    let mut formats = 0;
    for entry in std::fs::read_dir(&folder).expect("the fixtures") {
        let path = entry.expect("an entry").path();
        let golden = std::fs::read(path.join("golden.safetensors")).expect("golden values");
        let golden = SafeTensors::deserialize(&golden).expect("safetensors");
        let weights = Weights::open(&ModelFiles::at(&path).expect("a checkpoint")).expect("weights");
        for (name, wanted) in golden.tensors() {
            let wanted_bits: Vec<u32> =
                wanted.data().as_chunks::<4>().0.iter().map(|raw| u32::from_le_bytes(*raw)).collect();
            let tensor = weights.tensor(&name, wanted.shape()).expect("a matrix");
            for (start, end) in [(0, wanted_bits.len()), (3, wanted_bits.len() - 1)] {
                let mut out = vec![0.0; end - start];
                tensor.read_f32(start, &mut out);
                let bits: Vec<u32> = out.into_iter().map(f32::to_bits).collect();
                assert!(bits == wanted_bits[start..end], "{}: {name}", path.display());
            }
        }
        formats += 1;
    }
    assert_eq!(formats, 9);
}

#[test]
fn formats_that_are_not_read_are_refused_by_name() {
    let group = |weights: Value| {
        json!({"quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"weights": weights}}})
    };
    for (config, words) in [
        (json!({"quant_method": "bitsandbytes"}), "bitsandbytes"),
        (json!({}), "unnamed"),
        (json!({"quant_method": "gptq", "bits": 3, "group_size": 128}), "bits 3"),
        (json!({"quant_method": "gptq", "bits": 4}), "group_size null"),
        (json!({"quant_method": "gptq", "bits": 4, "group_size": 0}), "group_size 0"),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}),
            "marlin",
        ),
        (json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:a": {}}}), "dynamic"),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}), "gemv"),
        (
            json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": false}),
            "zero_point false",
        ),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "e5m2"),
        (json!({"quant_method": "fp8", "weight_block_size": [64, 64]}), "[64,64]"),
        (
            json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
            "nvfp4-pack-quantized",
        ),
        (json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}), "config_groups"),
        (group(json!({"num_bits": 4, "type": "float"})), "num_bits 4"),
        (group(json!({"num_bits": 8, "type": "int"})), "type"),
        (group(json!({"num_bits": 8, "type": "float", "strategy": "group"})), "strategy group"),
    ] {
        let error = QuantScheme::parse(&config).expect_err(words);
        assert!(error.contains(words), "{error}");
    }
    let all =
        json!({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": true}});
    let parsed = QuantScheme::of_config(all.to_string().as_bytes(), "config.json");
    let wanted = QuantScheme::Int4 { layout: Int4Layout::Gptq, group: None };
    assert_eq!(parsed.expect("supported"), wanted);
    let error = QuantScheme::of_config(br#"{"quantization_config": {"quant_method": "hqq"}}"#, "config.json");
    let error = error.expect_err("not supported").to_string();
    assert!(error.contains("hqq") && error.contains("gptq"), "{error}");
}

#[test]
fn compressed_tensors_with_another_computation_are_refused_by_name() {
    let with = |field: &str, value: Value| {
        let weights = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
        let mut config = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"weights": weights, "format": "float-quantized"}}});
        match field.strip_prefix("group ") {
            Some(field) => config["config_groups"]["group_0"][field] = value,
            None => config[field] = value,
        }
        QuantScheme::parse(&config)
    };
    let rotation = json!({"config_groups": {"R1": {"type": "hadamard", "apply": [], "randomize": false}}});
    for (field, value, words) in [
        ("transform_config", rotation, "transform_config"),
        ("transform_config", json!({"R1": {}}), "transform_config"),
        ("transform_config", json!("spinquant"), "transform_config"),
        ("sparsity_config", json!({"format": "sparse-24-bitmask"}), "sparsity_config: format"),
        ("sparsity_config", json!({"format": "sparse-bitmask"}), "sparse-bitmask"),
        ("group format", json!("nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        ("kv_cache_scheme", json!({"num_bits": 8}), "kv_cache_scheme"),
    ] {
        let error = with(field, value).expect_err(words);
        assert!(error.contains(words), "{error}");
    }
    for (field, value) in [
        ("transform_config", json!(null)),
        ("transform_config", json!({})),
        ("transform_config", json!({"config_groups": {}})),
        ("sparsity_config", json!({})),
        ("sparsity_config", json!({"format": "dense", "sparsity_structure": "unstructured"})),
        ("group format", json!(null)),
    ] {
        assert_eq!(with(field, value), Ok(QuantScheme::Fp8), "{field}");
    }
}

/// Parts of a matrix `w.weight` of 8 outputs by 8 inputs with one group.
fn parts(changed: Option<(&'static str, TensorPart<'static>)>) -> Result<QuantizedMatrix<'static>, String> {
    const ZEROS: &[u8] = &[0; 64];
    const SHAPES: [(&str, Dtype, &[usize], usize); 3] = [
        ("w.qweight", Dtype::I32, &[1, 8], 32),
        ("w.qzeros", Dtype::I32, &[1, 1], 4),
        ("w.scales", Dtype::F16, &[1, 8], 16),
    ];
    let find = |name: &str| {
        if let Some((_, part)) = changed.filter(|(changed, _)| *changed == name) {
            return Some(part);
        }
        let found = SHAPES.into_iter().find(|(known, ..)| *known == name);
        found.map(|(_, dtype, shape, bytes)| (dtype, shape, &ZEROS[..bytes]))
    };
    let scheme = QuantScheme::Int4 { layout: Int4Layout::Gptq, group: None };
    scheme.matrix("w.weight", &[8, 8], &find).expect("a quantized matrix")
}

#[test]
fn parts_that_do_not_fit_the_matrix_are_refused() {
    assert!(parts(None).is_ok());
    let cases: [(&'static str, TensorPart<'static>, &str); 8] = [
        ("w.qweight", (Dtype::I32, &[2, 8], &[0; 64]), "w.qweight"),
        ("w.qweight", (Dtype::I8, &[1, 8], &[0; 8]), "w.qweight"),
        ("w.qzeros", (Dtype::I32, &[2, 1], &[0; 8]), "w.qzeros"),
        ("w.scales", (Dtype::F16, &[8, 1], &[0; 16]), "w.scales"),
        ("w.scales", (Dtype::I8, &[1, 8], &[0; 8]), "w.scales"),
        ("w.g_idx", (Dtype::I32, &[4], &[0; 16]), "w.g_idx"),
        ("w.g_idx", (Dtype::I32, &[8], &[1; 32]), "w.g_idx names a group"),
        ("w.g_idx", (Dtype::I32, &[8], &[255; 32]), "w.g_idx names a group"),
    ];
    for (name, part, words) in cases {
        let error = parts(Some((name, part))).map(|_| ()).expect_err(words);
        assert!(error.contains(words), "{error}");
    }
    let scheme = QuantScheme::Int4 { layout: Int4Layout::Awq, group: None };
    assert!(scheme.matrix("w.weight", &[8, 8], &|_| None).is_none());
    // A matrix that the checkpoint keeps in floats.
    let float = only_weight(Dtype::F16, &[0; 128]);
    assert!(scheme.matrix("w.weight", &[8, 8], &float).is_none());
    assert!(QuantScheme::Fp8.matrix("w.weight", &[8, 8], &float).is_none());
    // An 8-bit matrix needs scales that fit.
    let bare = only_weight(Dtype::F8_E4M3, &[0; 64]);
    let error = QuantScheme::Fp8.matrix("w.weight", &[8, 8], &bare).expect("8-bit floats").map(|_| ());
    assert!(error.expect_err("no scales").contains("w.weight_scale is missing"));
    let wrong = |name: &str| match name {
        "w.weight_scale" => Some(FOUR_SCALES),
        _ => bare(name),
    };
    let error = QuantScheme::Fp8.matrix("w.weight", &[8, 8], &wrong).expect("8-bit floats").map(|_| ());
    assert!(error.expect_err("scales of another shape").contains("[4]"));
}

const FOUR_SCALES: TensorPart<'static> = (Dtype::F32, &[4], &[0; 16]);

/// Files with one tensor, `w.weight`, of 8 by 8 values.
fn only_weight(dtype: Dtype, bytes: &'static [u8]) -> impl Fn(&str) -> Option<TensorPart<'static>> {
    const SHAPE: &[usize] = &[8, 8];
    move |name| (name == "w.weight").then_some((dtype, SHAPE, bytes))
}
