//! Checks that the launches fit the sources.

use super::super::device::DeviceBuffer;
use super::*;

/// The parameters of features in kernels, by their name in the sources: the feature and its parameter.
const PARAMETERS: [(&str, KernelFeature, &str); 6] = [
    ("WINDOW_PARAMETER", KernelFeature::Windows, ", u32 window"),
    ("CAP_PARAMETER", KernelFeature::ScoreCaps, ", float cap"),
    ("SCALE_PARAMETER", KernelFeature::ScaledEmbeddings, ", float scale"),
    ("POST_PARAMETER", KernelFeature::PostNorms, ", const float* post"),
    ("ROTARY_PARAMETER", KernelFeature::PartialRotary, ", u32 rotary"),
    ("ACTIVATION_PARAMETER", KernelFeature::Gelu, ", u32 activation"),
];

/// A source with the parameters of features in their places.
fn expanded(target: &KernelTarget) -> String {
    let mut source = source(target, 3);
    for (name, feature, parameter) in PARAMETERS {
        let defined = format!("#define {name} {parameter}\n");
        assert!(source.contains(&defined), "{defined}");
        source = source.replace(&defined, "");
        source = source.replace(name, if target.features.has(feature) { parameter } else { "" });
    }
    source
}

/// Kinds of the parameters of a kernel in a source: `*` pointer, `u` u32, `l` u64, `f` float.
fn parameters(source: &str, name: &str) -> String {
    let start = source.find(&format!("{name}(const")).or_else(|| source.find(&format!("{name}(float*")));
    let start = start.or_else(|| source.find(&format!("{name}(T*"))).unwrap_or_else(|| panic!("no {name}"));
    let text = &source[start + name.len() + 1..];
    let text = &text[..text.find(')').expect("parameters end")];
    let kind = |parameter: &str| match parameter.trim() {
        pointer if pointer.contains('*') => '*',
        number if number.starts_with("u32 ") => 'u',
        number if number.starts_with("u64 ") => 'l',
        number if number.starts_with("float ") => 'f',
        other => panic!("{name}: parameter {other:?}"),
    };
    text.split(',').map(kind).collect()
}

fn kinds(launch: &Launch) -> String {
    let kind = |arg: &KernelArg| match arg {
        KernelArg::In(_) | KernelArg::Out(_) | KernelArg::Null => '*',
        KernelArg::U32(_) => 'u',
        KernelArg::U64(_) => 'l',
        KernelArg::F32(_) => 'f',
    };
    launch.args.iter().map(kind).collect()
}

#[test]
fn every_launch_has_the_parameters_of_its_kernel_in_both_sources() {
    let features = KernelFeature::ALL.map(|feature| KernelFeatures::NONE.with(feature));
    for features in [KernelFeatures::NONE, KernelFeatures::ALL].into_iter().chain(features) {
        for element in [Element::F32, Element::Bf16] {
            check_parameters(&KernelTarget { element, head_dim: 64, features });
        }
    }
}

fn check_parameters(target: &KernelTarget) {
    let (slice, source) = (DeviceSlice::of(DeviceBuffer(0), 0), expanded(target));
    let KernelTarget { element, features, .. } = *target;
    let activation = if features.has(KernelFeature::Gelu) { Activation::GeluTanh } else { Activation::Silu };
    let shape = KernelShape { heads: 8, kv_heads: 2, features, ..KernelShape::plain(element, 64) };
    let attention = AttentionArgs {
        qkv: slice,
        pool: slice,
        tables: slice,
        entries: slice,
        out: slice,
        partial: slice,
        summary: slice,
        window: None,
    };
    let norm = NormArgs { hidden: slice, delta: None, post: None, weight: slice, rows: None, out: slice };
    let scale = features.has(KernelFeature::ScaledEmbeddings).then_some(1.0);
    let rope = RopeKvArgs {
        qkv: slice,
        bias: None,
        norms: None,
        angles: slice,
        positions: slice,
        slots: slice,
        pool: slice,
    };
    let choice = ChooseArgs { logits: slice, values: slice, indices: slice, draws: slice, chosen: slice };
    let mut launches = vec![
        embed([slice; 3], 1, 1, scale),
        add_rms_norm(features, &norm, 1, 1e-5, 1),
        rope_kv(&shape, &rope, 1, 1),
        prefill_attention(&shape, &attention, 1, 1),
        silu_mul(slice, None, slice, (1, 1), activation),
    ];
    launches.extend(decode_attention(&shape, &attention, 1, 1, 1));
    launches.extend(choose(&choice, 1, 1));
    let matmul = |outputs| Matmul {
        x: slice,
        weights: slice,
        out: slice,
        rows: 8,
        inputs: 64,
        outputs,
        element,
        result: Element::F32,
    };
    launches.extend(few_rows(&matmul(64), 1));
    launches.extend(few_rows(&matmul(32), 1));
    launches.extend(few_rows_gated(&matmul(32), None, slice, activation));
    if features.has(KernelFeature::LogitCap) {
        launches.push(cap_logits(slice, 1, 1, 1.0));
    }
    if features.has(KernelFeature::Experts) {
        launches.extend(experts(element, activation).launches(&expert_args(slice), 1));
    }
    let mut seen: Vec<_> = launches.iter().map(|launch| launch.kernel).collect();
    seen.sort_unstable();
    assert_eq!(seen, target.kernels());
    for launch in launches {
        let name = launch.kernel.label();
        assert_eq!(kinds(&launch), parameters(&source, name), "{name}, {target:?}");
    }
}

#[test]
fn products_of_few_rows_are_ours_where_they_fit() {
    let slice = DeviceSlice::of(DeviceBuffer(0), 0);
    let matmul = |rows, inputs, outputs| Matmul {
        x: slice,
        weights: slice,
        out: slice,
        rows,
        inputs,
        outputs,
        element: Element::Bf16,
        result: Element::F32,
    };
    let kernel = |size: (usize, usize, usize)| {
        few_rows(&matmul(size.0, size.1, size.2), 132).map(|launch| (launch.kernel, launch.grid[0]))
    };
    // Sizes of Llama 3.1 8B.
    assert_eq!(kernel((1, 4096, 4096)), Some((Kernel::FewRowsDeep, 256)));
    assert_eq!(kernel((8, 14_336, 4096)), Some((Kernel::FewRowsDeep, 256)));
    assert_eq!(kernel((1, 4096, 6144)), Some((Kernel::FewRowsWide, 192)));
    assert_eq!(kernel((1, 4096, 128_256)), Some((Kernel::FewRowsWide, 4008)));
    for other in [(9, 4096, 4096), (1, 4000, 4096), (1, 4096, 4100), (1, 4096, 6160)] {
        assert_eq!(kernel(other), None, "{other:?}");
    }
    assert_eq!(few_rows(&Matmul { element: Element::F32, ..matmul(1, 64, 64) }, 132), None);
    let gated = |outputs| {
        let launch = few_rows_gated(&matmul(1, 64, outputs), None, slice, Activation::Silu);
        launch.map(|launch| launch.grid[0])
    };
    assert_eq!([gated(28_672), gated(96), gated(80)], [Some(896), Some(3), None]);
}

#[test]
fn sources_include_nothing() {
    for element in [Element::F32, Element::Bf16] {
        let target = KernelTarget { features: KernelFeatures::ALL, ..KernelTarget::plain(element, 64) };
        assert!(!source(&target, 3).contains("#include"), "a kernel needs more than the compiler");
    }
}

#[test]
fn decode_attention_is_split_by_what_fills_the_device() {
    let shape = KernelShape { heads: 32, kv_heads: 8, ..KernelShape::plain(Element::Bf16, 128) };
    // 132 multiprocessors with two blocks each run 264 blocks at a time; each sequence has 8.
    assert_eq!([1, 8, 32, 33, 256].map(|sequences| shape.splits(sequences, 132)), [33, 4, 1, 1, 1]);
    // 192 blocks fill three quarters of a round. 768 take three rounds, each a quarter as long. 272 are slightly more
    // than a round.
    assert_eq!([24, 34].map(|sequences| shape.splits(sequences, 132)), [4, 3]);
    assert_eq!(KernelShape { heads: 1, kv_heads: 1, ..shape }.splits(1, 132), SPLITS_MAX);
}

#[test]
fn heads_without_kernels_are_refused_by_name() {
    assert!(supported(Element::Bf16, 256).is_ok() && supported(Element::F32, 24).is_ok());
    assert!(supported(Element::Bf16, 24).unwrap_err().contains("head_dim 24"));
    assert!(supported(Element::F32, 512).unwrap_err().contains("head_dim 512"));
}

#[test]
fn every_launch_of_attention_fits_a_device_with_99_kib_of_shared_memory() {
    let slice = DeviceSlice::of(DeviceBuffer(0), 0);
    let [qkv, pool, tables, entries, out, partial, summary] = [slice; 7];
    let parts = AttentionArgs { qkv, pool, tables, entries, out, partial, summary, window: None };
    let most = 99 << 10;
    for head_dim in (16..=256).step_by(16) {
        let stages = decode_stages(head_dim, most);
        let wanted = match head_dim {
            0..=112 => 3,
            113..=176 => 2,
            _ => 1,
        };
        assert_eq!(stages, wanted, "{head_dim}");
        let shape = KernelShape {
            heads: 8,
            kv_heads: 2,
            decode_stages: stages,
            ..KernelShape::plain(Element::Bf16, head_dim)
        };
        let [decode, _] = decode_attention(&shape, &parts, 0, 1, 1);
        let prefill = prefill_attention(&shape, &parts, 0, 1);
        for launch in [decode, prefill] {
            assert!(launch.shared_bytes as usize <= most, "{head_dim}: {launch:?}");
        }
        let text = source(&KernelTarget::plain(Element::Bf16, head_dim), stages);
        assert!(text.contains(&format!("#define DECODE_STAGES {stages}\n")));
        let keeps = head_dim > 128 || decode_stages(head_dim, 163 << 10) == 3;
        assert!(keeps, "an A100 keeps what was measured");
    }
}

fn experts(element: Element, activation: Activation) -> ExpertShape {
    let (count, per_token, hidden, intermediate) = (8, 2, 64, 96);
    ExpertShape { element, count, per_token, hidden, intermediate, normalized: true, activation }
}

fn expert_args(slice: DeviceSlice) -> ExpertArgs {
    ExpertArgs {
        logits: slice,
        slots: slice,
        chosen: slice,
        weights: slice,
        order: slice,
        tiles: slice,
        x: slice,
        gate_up: slice,
        down: slice,
        activated: slice,
        results: slice,
        projected: slice,
    }
}

#[test]
fn tiles_suffice_for_every_choice_of_experts() {
    let shape = experts(Element::Bf16, Activation::Silu);
    for rows in [1, 2, 3, 63, 64, 65, 500] {
        let pairs = rows * shape.per_token;
        // All pairs spread evenly over the first experts, and as unevenly as they can be.
        for used in 1..=shape.count.min(pairs) {
            let even = |expert: usize| pairs / used + usize::from(expert < pairs % used);
            let uneven = |expert: usize| if expert == 0 { pairs + 1 - used } else { 1 };
            let tiles = |of: &dyn Fn(usize) -> usize| (0..used).map(|e| of(e).div_ceil(EXPERT_ROWS)).sum();
            let most: usize = tiles(&even);
            assert!(most.max(tiles(&uneven)) <= shape.tiles(rows), "{rows} rows, {used} experts");
        }
    }
}

#[test]
fn a_source_without_features_names_none_of_their_code() {
    for element in [Element::F32, Element::Bf16] {
        let plain = KernelTarget::plain(element, 64);
        let text = source(&plain, 3);
        assert!(KernelFeature::ALL.into_iter().all(|f| text.contains(&format!("#define {} 0\n", f.label()))));
        for kernel in ["route(", "group_experts(", "expert_down("] {
            assert!(!text.contains(kernel), "{kernel}");
        }
        assert!(!plain.kernels().contains(&Kernel::CapLogits));
    }
}
