//! Checks that the launches fit the sources.

use super::super::device::DeviceBuffer;
use super::*;

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
    let slice = DeviceSlice::of(DeviceBuffer(0), 0);
    for element in [Element::F32, Element::Bf16] {
        let source = source(element, 64, 3);
        let shape = KernelShape {
            element,
            heads: 8,
            kv_heads: 2,
            head_dim: 64,
            decode_stages: 3,
            block_tokens: 16,
            block_stride: 1,
            norm_eps: 1e-5,
        };
        let attention = AttentionArgs {
            qkv: slice,
            pool: slice,
            tables: slice,
            entries: slice,
            out: slice,
            partial: slice,
            summary: slice,
        };
        let norm = NormArgs { hidden: slice, delta: None, weight: slice, rows: None, out: slice };
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
            embed(slice, slice, slice, 1, 1),
            add_rms_norm(&norm, 1, 1e-5, 1),
            rope_kv(&shape, &rope, 1, 1),
            prefill_attention(&shape, &attention, 1, 1),
            silu_mul(slice, None, slice, 1, 1),
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
        launches.extend(few_rows_gated(&matmul(32), None, slice));
        let mut seen: Vec<_> = launches.iter().map(|launch| launch.kernel).collect();
        seen.sort_unstable();
        assert_eq!(seen, Kernel::all(element));
        for launch in launches {
            let name = launch.kernel.label();
            assert_eq!(kinds(&launch), parameters(&source, name), "{name}, {element:?}");
        }
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
    let gated = |outputs| few_rows_gated(&matmul(1, 64, outputs), None, slice).map(|launch| launch.grid[0]);
    assert_eq!([gated(28_672), gated(96), gated(80)], [Some(896), Some(3), None]);
}

#[test]
fn sources_include_nothing() {
    for element in [Element::F32, Element::Bf16] {
        assert!(!source(element, 64, 3).contains("#include"), "a kernel needs more than the compiler");
    }
}

#[test]
fn decode_attention_is_split_by_what_fills_the_device() {
    let shape = KernelShape {
        element: Element::Bf16,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        decode_stages: 3,
        block_tokens: 16,
        block_stride: 1,
        norm_eps: 1e-5,
    };
    // 132 multiprocessors with two blocks each run 264 blocks at a time; each sequence has 8.
    assert_eq!([1, 8, 32, 33, 256].map(|sequences| shape.splits(sequences, 132)), [33, 4, 1, 1, 1]);
    // 192 blocks fill three quarters of a round. 768 take three rounds, each a quarter as long. 272 are slightly more
    // than a round.
    assert_eq!([24, 34].map(|sequences| shape.splits(sequences, 132)), [4, 3]);
    assert_eq!(KernelShape { heads: 1, kv_heads: 1, ..shape }.splits(1, 132), SPLITS_MAX);
}

#[test]
fn heads_without_kernels_are_refused_by_name() {
    assert!(supported(Element::Bf16, 128).is_ok() && supported(Element::F32, 24).is_ok());
    assert!(supported(Element::Bf16, 24).unwrap_err().contains("head_dim 24"));
    assert!(supported(Element::F32, 512).unwrap_err().contains("head_dim 512"));
}

#[test]
fn every_launch_of_attention_fits_a_device_with_99_kib_of_shared_memory() {
    let slice = DeviceSlice::of(DeviceBuffer(0), 0);
    let [qkv, pool, tables, entries, out, partial, summary] = [slice; 7];
    let parts = AttentionArgs { qkv, pool, tables, entries, out, partial, summary };
    let most = 99 << 10;
    for head_dim in (16..=128).step_by(16) {
        let stages = decode_stages(head_dim, most);
        assert_eq!(stages, if head_dim == 128 { 2 } else { 3 });
        let shape = KernelShape {
            element: Element::Bf16,
            heads: 8,
            kv_heads: 2,
            head_dim,
            decode_stages: stages,
            block_tokens: 16,
            block_stride: 1,
            norm_eps: 1e-5,
        };
        let [decode, _] = decode_attention(&shape, &parts, 0, 1, 1);
        let prefill = prefill_attention(&shape, &parts, 0, 1);
        for launch in [decode, prefill] {
            assert!(launch.shared_bytes as usize <= most, "{head_dim}: {launch:?}");
        }
        assert!(
            source(Element::Bf16, head_dim, stages).contains(&format!("#define DECODE_STAGES {stages}\n"))
        );
        assert_eq!(decode_stages(head_dim, 163 << 10), 3, "an A100 keeps what was measured");
    }
}
