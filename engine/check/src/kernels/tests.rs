//! Checks that the kernel cases find errors and that a failed case does not stop the others.

use super::*;

#[test]
fn every_case_passes_on_the_software_device() {
    let plain = [(Element::F32, 24), (Element::Bf16, 64)].map(|(e, dim)| KernelTarget::plain(e, dim));
    let with_features = plain.map(|target| KernelTarget { features: KernelFeatures::ALL, ..target });
    for (target, fewest) in
        plain.map(|target| (target, 30)).into_iter().chain(with_features.map(|t| (t, 120)))
    {
        let mut device = SoftwareDevice::new(SOFT_BYTES, target.element, target.head_dim);
        let lines = kernels(&mut device, &target).unwrap();
        assert!(lines.len() > fewest && lines.iter().all(|line| line.passed), "{lines:?}");
    }
}

#[test]
fn a_kernel_with_other_results_fails_its_cases() {
    // Reference kernels for another head width: exactly the kernels that read or write heads differ.
    let mut device = SoftwareDevice::new(SOFT_BYTES, Element::F32, 32);
    let lines = kernels(&mut device, &KernelTarget::plain(Element::F32, 64)).unwrap();
    let failed: Vec<_> = lines.iter().filter(|line| !line.passed).map(|line| line.what.clone()).collect();
    for kernel in ["rope_kv", "decode_attention", "prefill_attention"] {
        assert!(failed.iter().any(|what| what.starts_with(kernel)), "{kernel}: {failed:?}");
    }
    assert!(!failed.iter().any(|what| what.starts_with("embed")), "{failed:?}");
}

#[test]
fn a_case_that_exceeds_device_memory_fails_and_the_others_run() {
    // Memory for the small cases only.
    let mut device = SoftwareDevice::new(1 << 20, Element::F32, 32);
    let lines = kernels(&mut device, &KernelTarget::plain(Element::F32, 32)).unwrap();
    let of = |passed: bool| lines.iter().filter(move |line| line.passed == passed);
    assert!(
        of(true).count() > 5 && of(false).any(|line| line.numbers.contains("device memory")),
        "{lines:?}"
    );
}

#[test]
fn a_nan_result_fails() {
    let nan = f32::NAN.to_le_bytes();
    let line = compared("x", Comparison::Near(Element::F32, 1.0), &nan, &1.0_f32.to_le_bytes());
    assert!(!line.passed, "{line:?}");
}
