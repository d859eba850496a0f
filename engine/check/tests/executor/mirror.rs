//! A pool without a mirror: steps, tiers and digests use the device's memory alone.

use super::*;

#[test]
fn a_pool_without_a_mirror_computes_stores_loads_and_shows_the_same_bytes() {
    let config = config("Qwen2", "");
    let (mut mirrored, mut alone) =
        (on_software(&config, |_| ()), on_software(&config, |options| options.mirror = None));
    assert!(alone.regions().is_empty());
    assert_eq!((alone.blocks(), alone.geometry()), (mirrored.blocks(), mirrored.geometry()));
    let (text, table) = (tokens(4, 60), blocks(3, 8));
    let step = |tokens, start, block_table| SeqStep {
        tokens,
        start,
        block_table,
        logits: LogitsRequest::Last,
        adapter: None,
    };
    let (mut logits, mut theirs) = (Logits::default(), Logits::default());
    for (from, to) in [(0, 40), (40, 56), (56, 57)] {
        mirrored.execute(&[step(&text[from..to], from, &table)], &mut logits).unwrap();
        alone.execute(&[step(&text[from..to], from, &table)], &mut theirs).unwrap();
        assert_eq!(logits.values, theirs.values);
    }
    let full = &table[..7];
    assert_eq!(mirrored.publish(full).unwrap(), full);
    let copies = alone.device().copies;
    assert_eq!(alone.publish(full).unwrap(), full);
    assert_eq!(alone.device().copies, copies, "there is no mirror to copy to");
    for block in full {
        let bytes = alone.read_block(*block).unwrap();
        assert_eq!(bytes, mirrored.read_block(*block).unwrap(), "{block:?}");
        assert!(bytes[0].iter().any(|byte| *byte != 0));
    }
    // The blocks are stored, and loaded into others, which the next steps read.
    let pool = alone.shared_pool().expect("the device has a shared pool");
    let slots = Region::allocate(40, pool.block_bytes());
    let elsewhere = blocks(20, 8);
    for (here, there) in full.iter().zip(&elsewhere) {
        alone.store(&[*here]).unwrap();
        pool.store(*here, &slots, *here).unwrap();
        alone.reserve(&[*there]);
        pool.load(&slots, *here, *there).unwrap();
        assert_eq!(alone.read_block(*there).unwrap(), [slots.read_block(*here)]);
    }
    mirrored.execute(&[step(&text[56..], 56, &table)], &mut logits).unwrap();
    alone.execute(&[step(&text[56..], 56, &elsewhere)], &mut theirs).unwrap();
    assert_eq!(logits.values, theirs.values);
}

#[test]
fn blocks_without_a_mirror_are_not_read_on_the_host_and_a_failed_load_leaves_nothing_to_upload() {
    let config = config("Llama", "");
    let (mut device, mut logits) = (on_software(&config, |options| options.mirror = None), Logits::default());
    let (table, prompt) = (blocks(0, 2), tokens(3, 16));
    // Reserved, never loaded, and then computed.
    device.reserve(&table);
    for at in [0, 8] {
        let step = SeqStep {
            tokens: &prompt[at..at + 8],
            start: at,
            block_table: &table,
            logits: LogitsRequest::Last,
            adapter: None,
        };
        device.execute(&[step], &mut logits).unwrap();
    }
    device.mark_leased(&table).unwrap();
    let pool = device.shared_pool().expect("the device has a shared pool");
    assert!(matches!(pool.download(&table), Err(DeviceError::Undefined(_))));
    assert!(pool.usable().is_ok());
    // A copy for a digest that hangs disables the device, as every other copy does.
    device.device().hang();
    assert!(device.read_block(table[0]).is_err() && device.usable().is_err());
}
