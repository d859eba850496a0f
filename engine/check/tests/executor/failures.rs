//! Devices that hang or fail: the executor computes nothing with them any more.

use super::*;

#[test]
fn a_hung_upload_disables_the_device() {
    let config = config("Llama", "");
    let (mut device, mut logits) = (on_software(&config, |_| ()), Logits::default());
    let table = blocks(0, 2);
    device.reserve(&table);
    let shared_kv_pool = device.shared_pool().expect("the device has a shared pool");
    device.device().hang();
    assert!(matches!(shared_kv_pool.upload(&table), Err(DeviceError::Hung { .. })));
    device.device().recover();
    // The copy may still write into blocks that are reused.
    assert!(
        shared_kv_pool.upload(&table).is_err()
            && shared_kv_pool.load(shared_kv_pool.region(), table[0], table[1]).is_err()
    );
    let next = device.execute(&[step(&[1], 0, &table)], &mut logits);
    assert!(next.is_err() && device.usable().is_err());
}

#[test]
fn a_hung_copy_disables_the_device() {
    let config = config("Llama", "");
    let (mut device, mut logits) = (on_software(&config, |_| ()), Logits::default());
    let (table, prompt) = (blocks(0, 2), tokens(3, 16));
    device.execute(&[step(&prompt, 0, &table)], &mut logits).unwrap();
    device.mark_leased(&table[..1]).unwrap();
    let shared_kv_pool = device.shared_pool().expect("the device has a shared pool");
    device.device().hang();
    let hung = shared_kv_pool.download(&table[..1]).unwrap_err();
    assert!(matches!(hung, DeviceError::Hung { what: "a copy of KV blocks", .. }), "{hung}");
    // Blocks that were freed since may be reused for any sequence. The device stays disabled, even if it works again.
    device.device().recover();
    let before = (device.device().launches, device.device().copies);
    let refused = |result: Result<(), ExecutorError>| {
        let why = result.unwrap_err().to_string();
        assert!(why.contains("a copy of KV blocks not completed"), "{why}");
    };
    device.reserve(&table);
    refused(device.execute(&[step(&prompt, 0, &table)], &mut logits));
    refused(device.publish(&table).map(drop));
    refused(device.mark_leased(&table));
    refused(device.usable());
    assert!(shared_kv_pool.download(&table[..1]).is_err());
    assert_eq!((device.device().launches, device.device().copies), before);
}

#[test]
fn a_failed_upload_disables_the_device() {
    let config = config("Qwen2", "");
    let (text, table) = (tokens(9, 33), blocks(3, 5));
    let (mut logits, mut theirs) = (Logits::default(), Logits::default());
    let mut producer = on_software(&config, |_| ());
    producer.execute(&[step(&text[..32], 0, &table)], &mut logits).unwrap();
    producer.publish(&table).unwrap();
    // The failing upload is by a step, a publication and a lease.
    for by in 0..3 {
        let mut consumer = on_software(&config, |_| ());
        consumer.reserve(&table[..4]);
        for block in &table[..4] {
            consumer.regions()[0].write_block(*block, &producer.regions()[0].read_block(*block));
        }
        consumer.device().fail_upload(2);
        let failed = match by {
            0 => consumer.execute(&[step(&text[32..], 32, &table)], &mut theirs),
            1 => consumer.publish(&table[..4]).map(drop),
            _ => consumer.mark_leased(&table[..4]),
        };
        let why = failed.unwrap_err().to_string();
        assert!(why.contains("upload"), "{why}");
        // The device works again. The executor rejects steps of the same prompt and of all others.
        let copies = consumer.device().copies;
        for (tokens, start) in [(&text[32..], 32), (&text[..1], 0)] {
            let again = consumer.execute(&[step(tokens, start, &table)], &mut theirs);
            assert!(again.is_err() && theirs.values.is_empty(), "case {by}: a step ran without all blocks");
        }
        assert!(consumer.publish(&table[..4]).is_err() && consumer.mark_leased(&table[..4]).is_err());
        assert!(consumer.usable().is_err());
        assert_eq!(consumer.device().copies, copies);
    }
}

#[test]
fn a_hung_step_disables_the_device() {
    let config = config("Llama", "");
    let (mut device, mut logits) = (on_software(&config, |_| ()), Logits::default());
    let (table, prompt) = (blocks(0, 2), tokens(3, 16));
    device.device().hang();
    let why = device.execute(&[step(&prompt, 0, &table)], &mut logits).unwrap_err().to_string();
    assert!(why.contains("the device is disabled"), "{why}");
    device.device().recover();
    let next = device.execute(&[step(&prompt, 0, &table)], &mut logits);
    assert!(next.is_err() && device.usable().is_err());
}
