//! Work that the software device rejects, and work that it accepts.

use super::*;
use baton_engine::compute::cuda::kernels;
use baton_engine::model::spec::Activation;

fn device() -> SoftwareDevice {
    SoftwareDevice::new(1 << 20, Element::F32, 32)
}

fn at(host: HostBuffer) -> HostSlice {
    HostSlice { host, offset: 0 }
}

/// A launch that reads one buffer and writes another.
fn silu(from: DeviceSlice, to: DeviceSlice) -> Launch {
    kernels::silu_mul(from, None, to, (8, 1), Activation::Silu)
}

struct SoftwareFixture {
    device: SoftwareDevice,
    a: DeviceSlice,
    b: DeviceSlice,
    host: HostBuffer,
    one: Stream,
    two: Stream,
    event: StreamEvent,
}

fn software_fixture() -> SoftwareFixture {
    let mut device = device();
    let (a, b) = (device.alloc(64).unwrap(), device.alloc(64).unwrap());
    let (one, two) = (device.stream(Priority::Steps).unwrap(), device.stream(Priority::Steps).unwrap());
    let (host, event) = (device.host(64).unwrap(), device.event().unwrap());
    SoftwareFixture { device, a: DeviceSlice::of(a, 64), b: DeviceSlice::of(b, 32), host, one, two, event }
}

fn assert_undefined<T>(result: Result<T, DeviceError>, word: &str) {
    match result {
        Err(DeviceError::Undefined(what)) => assert!(what.contains(word), "{what}"),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("the device accepted the work"),
    }
}

#[test]
fn only_events_order_the_work_of_two_streams() {
    let SoftwareFixture { mut device, a, b, one, two, event, .. } = software_fixture();
    device.launch(one, &silu(a, b)).unwrap();
    assert_undefined(device.launch(two, &silu(b.part(0, 0), a)), "argument 0");
    assert_undefined(device.copy(two, b, a.part(0, 32)), "may still be written by stream 1");
    device.record(event, one).unwrap();
    assert_undefined(device.copy(two, b, a.part(0, 32)), "may still be");
    device.wait(two, event).unwrap();
    device.copy(two, b, a.part(0, 32)).unwrap();
    // In the other direction the first stream has not waited for the second.
    assert_undefined(device.launch(one, &silu(a, b)), "may still be");
    device.record(event, two).unwrap();
    device.wait(one, event).unwrap();
    device.launch(one, &silu(a, b)).unwrap();
}

#[test]
fn an_event_does_not_cover_work_enqueued_after_it() {
    let SoftwareFixture { mut device, a, b, one, two, event, .. } = software_fixture();
    device.record(event, one).unwrap();
    device.launch(one, &silu(a, b)).unwrap();
    device.wait(two, event).unwrap();
    assert_undefined(device.copy(two, b, a.part(0, 32)), "may still be written");
}

#[test]
fn two_streams_may_read_the_same_bytes_and_write_different_ones() {
    let SoftwareFixture { mut device, a, b, one, two, .. } = software_fixture();
    let half = |at| kernels::silu_mul(a, None, b.part(at, 16), (4, 1), Activation::Silu);
    device.launch(one, &half(0)).unwrap();
    device.launch(two, &half(16)).unwrap();
    assert_undefined(device.copy(one, b.part(0, 4), b.part(16, 4)), "stream 2");
}

#[test]
fn host_access_that_conflicts_with_a_copy_is_rejected_until_the_host_synchronizes() {
    let SoftwareFixture { mut device, a, host, one, event, .. } = software_fixture();
    device.write_host(at(host), &[1; 64]).unwrap();
    device.upload(one, at(host), a).unwrap();
    assert_undefined(device.write_host(at(host), &[2; 64]), "host memory is written");
    let mut bytes = [0; 64];
    // A read during a copy that only reads is accepted.
    device.read_host(at(host), &mut bytes).unwrap();
    device.record(event, one).unwrap();
    device.synchronize(event).unwrap();
    device.write_host(at(host), &[2; 64]).unwrap();
    device.download(one, a, at(host)).unwrap();
    assert_undefined(device.read_host(at(host), &mut bytes), "host memory is read");
    device.record(event, one).unwrap();
    assert_undefined(device.read_host(at(host), &mut bytes), "host memory is read");
    device.synchronize(event).unwrap();
    device.read_host(at(host), &mut bytes).unwrap();
    assert_eq!(bytes, [1; 64]);
}

#[test]
fn memory_in_use_is_not_freed_and_freed_memory_is_not_used() {
    let SoftwareFixture { mut device, a, b, one, event, .. } = software_fixture();
    device.begin_capture(one).unwrap();
    device.launch(one, &silu(a, b)).unwrap();
    let graph = device.end_capture(one).unwrap();
    assert_eq!(device.launches, 0, "a capture runs no launch");
    device.replay(graph, one).unwrap();
    assert_undefined(device.free(a.buffer), "while it is used");
    let SoftwareFixture { mut device, a, b, one, .. } = software_fixture();
    device.begin_capture(one).unwrap();
    device.launch(one, &silu(a, b)).unwrap();
    let graph = device.end_capture(one).unwrap();
    device.free(a.buffer).unwrap();
    assert_undefined(device.replay(graph, one), "was freed");
    assert_undefined(device.free(a.buffer), "freed twice");
    let _ = event;
}

#[test]
fn accesses_beyond_a_buffer_are_rejected_before_and_during_a_launch() {
    let SoftwareFixture { mut device, a, b, one, host, .. } = software_fixture();
    let beyond = DeviceSlice { bytes: 65, ..a };
    assert_undefined(device.launch(one, &silu(beyond, b)), "of a buffer of 64");
    // Eight values of gate and eight of up are 64 bytes; sixteen are too long.
    assert_undefined(
        device.launch(one, &kernels::silu_mul(a, None, b, (16, 1), Activation::Silu)),
        "argument 0: bytes 64 to 128 of 64",
    );
    assert_undefined(device.upload(one, HostSlice { host, offset: 32 }, a), "of host memory");
    let product = |rows| Matmul {
        x: a,
        weights: a,
        out: b,
        rows,
        inputs: 4,
        outputs: 4,
        element: Element::F32,
        result: Element::F32,
    };
    device.matmul(one, &product(2)).unwrap();
    assert_undefined(device.matmul(one, &product(3)), "a product needs 48 bytes and has 32");
}

#[test]
fn launches_outside_device_limits_are_rejected() {
    let SoftwareFixture { mut device, a, b, one, .. } = software_fixture();
    let launch = silu(a, b);
    for wrong in [
        Launch { grid: [0, 1, 1], ..launch.clone() },
        Launch { grid: [1, 65_536, 1], ..launch.clone() },
        Launch { threads: 1025, ..launch.clone() },
        Launch { shared_bytes: 228 << 10, ..launch },
    ] {
        assert_undefined(device.launch(one, &wrong), "silu_mul");
    }
}

#[test]
fn a_block_table_entry_outside_the_pool_is_rejected() {
    let mut device = device();
    let stream = device.stream(Priority::Steps).unwrap();
    let mut buffer = |words: usize| DeviceSlice::of(device.alloc(words * 4).unwrap(), words * 4);
    let plain = kernels::KernelShape::plain(Element::F32, 32);
    let shape = kernels::KernelShape { block_tokens: 8, block_stride: 2 * 8 * 32, ..plain };
    let parts = kernels::AttentionArgs {
        qkv: buffer(96),
        pool: buffer(2 * 8 * 32),
        tables: buffer(4),
        entries: buffer(3),
        out: buffer(32),
        partial: buffer(32),
        summary: buffer(2),
        window: None,
    };
    let host = device.host(12).unwrap();
    // Row 0 sees nine keys. Its table begins at 0 and contains two zeros: block 0 twice.
    let entry: Vec<u8> = [0_i32, 9, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    device.write_host(at(host), &entry).unwrap();
    device.upload(stream, at(host), parts.entries).unwrap();
    let [attend, merge] = kernels::decode_attention(&shape, &parts, 0, 1, 1);
    device.launch(stream, &attend).unwrap();
    device.launch(stream, &merge).unwrap();
    let event = device.event().unwrap();
    device.record(event, stream).unwrap();
    device.synchronize(event).unwrap();
    // Block 1 of a pool of one.
    device.write_host(at(host), &1_i32.to_le_bytes()).unwrap();
    device.upload(stream, at(host), parts.tables.part(4, 4)).unwrap();
    assert_undefined(device.launch(stream, &attend), "decode_attention: argument 1");
}
