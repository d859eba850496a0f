//! The offload threads on disks that work, fail, are full, hang and come back.

use std::collections::HashMap;
use std::io;
use std::sync::mpsc::Receiver;

use baton_connector::region::Region;

use super::super::disk::Volume;
use super::super::record::TierIdentity;
use super::*;

const BYTES: usize = 64;
const PATIENCE: Duration = Duration::from_secs(60);

/// How a disk behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Well,
    Full,
    Broken,
    Hanging,
    Panicking,
}

struct Files {
    state: Mutex<(Mood, HashMap<BlockHash, Vec<u8>>)>,
    changed: Condvar,
}

#[derive(Clone)]
struct Moody(Arc<Files>);

impl Moody {
    fn new() -> Self {
        Self(Arc::new(Files { state: Mutex::new((Mood::Well, HashMap::new())), changed: Condvar::new() }))
    }

    fn set(&self, mood: Mood) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).0 = mood;
        self.0.changed.notify_all();
    }

    fn with<T>(&self, act: impl FnOnce(&mut HashMap<BlockHash, Vec<u8>>) -> T) -> io::Result<T> {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.0 == Mood::Hanging {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match state.0 {
            Mood::Well => Ok(act(&mut state.1)),
            Mood::Full => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            Mood::Broken => Err(io::Error::from_raw_os_error(libc::EIO)),
            Mood::Panicking => panic!("a disk that makes a worker panic"),
            Mood::Hanging => unreachable!("waited for"),
        }
    }
}

impl Volume for Moody {
    fn put(&self, hash: BlockHash, header: &[u8], block: &[u8]) -> io::Result<()> {
        self.with(|files| drop(files.insert(hash, [header, block].concat())))
    }

    fn get(&self, hash: BlockHash, _: usize) -> io::Result<Vec<u8>> {
        self.with(|files| files.get(&hash).cloned())?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn remove(&self, hash: BlockHash) -> io::Result<()> {
        self.with(|files| drop(files.remove(&hash)))
    }
}

struct Bench {
    workers: Workers,
    device: Region,
    disk: Moody,
    reports: Receiver<Report>,
    next: u64,
}

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 32])
}

fn bench(pace: Pace) -> Bench {
    let (device, disk) = (Region::allocate(8, BYTES), Moody::new());
    for n in 0..8 {
        device.write_block(BlockId(n), &[n as u8; BYTES]);
    }
    let (tell, reports) = sync_channel(1024);
    let tier = DiskTier::new(Box::new(disk.clone()), TierIdentity { layout: 1, model: [0; 16] }, BYTES);
    let arena = Arena::new(8, vec![device.clone()]);
    let workers =
        Workers::start(arena, Some(tier), pace, move |report| tell.send(report).expect("the test listens"));
    Bench { workers: workers.expect("threads"), device, disk, reports, next: 0 }
}

impl Bench {
    fn id(&mut self) -> TransferId {
        self.next += 1;
        TransferId(self.next)
    }

    fn report(&self) -> Report {
        self.reports.recv_timeout(PATIENCE).expect("a report")
    }

    fn store(&mut self, n: u8) -> Report {
        let id = self.id();
        assert!(self.workers.order(Order::Store {
            id,
            hash: hash(n),
            block: BlockId(n.into()),
            slot: HostSlot(n.into())
        }));
        self.report()
    }

    fn write(&mut self, n: u8, evict: Vec<BlockHash>) -> TransferId {
        let id = self.id();
        assert!(self.workers.order(Order::Write { id, hash: hash(n), slot: HostSlot(n.into()), evict }));
        id
    }

    fn load(&mut self, n: u8, from: Source, block: u32) -> TransferId {
        let id = self.id();
        assert!(self.workers.order(Order::Load { id, hash: hash(n), from, block: BlockId(block) }));
        id
    }
}

const FILE: Source = Source::Disk { keep: None };

#[test]
fn a_block_goes_down_to_the_disk_and_comes_up_again() {
    let mut bench = bench(Pace::default());
    assert!(matches!(bench.store(3), Report::Ended(_, Ok(()))));
    let id = bench.write(3, vec![]);
    assert_eq!(bench.report(), Report::Ended(id, Ok(())));
    let id = bench.load(3, Source::Disk { keep: Some(HostSlot(5)) }, 0);
    assert_eq!(bench.report(), Report::Ended(id, Ok(())));
    assert_eq!(bench.device.read_block(BlockId(0)), [3; BYTES]);
    let id = bench.load(3, Source::Host(HostSlot(5)), 1);
    assert_eq!(bench.report(), Report::Ended(id, Ok(())));
    assert_eq!(bench.device.read_block(BlockId(1)), [3; BYTES]);
}

#[test]
fn a_file_that_is_missing_or_damaged_never_reaches_the_device() {
    let mut bench = bench(Pace::default());
    bench.store(3);
    bench.write(3, vec![]);
    bench.report();
    bench.disk.with(|files| files.get_mut(&hash(3)).expect("written")[HEADER_BYTES + 7] ^= 4).expect("well");
    for fault in [Fault::Corrupt, Fault::Missing] {
        let id = bench.load(3, FILE, 0);
        assert_eq!(bench.report(), Report::Ended(id, Err(fault)));
        assert_eq!(bench.device.read_block(BlockId(0)), [0; BYTES]);
    }
}

#[test]
fn a_disk_that_is_full_or_broken_is_left_alone_and_used_again_when_it_works() {
    for (mood, fault) in [(Mood::Full, Fault::Full), (Mood::Broken, Fault::Io)] {
        let mut bench = bench(Pace { disk_rest: Duration::from_millis(20), ..Pace::default() });
        bench.store(3);
        bench.disk.set(mood);
        for _ in 0..3 {
            let id = bench.write(3, vec![hash(9)]);
            assert_eq!(bench.report(), Report::Ended(id, Err(fault)));
        }
        assert_eq!(bench.report(), Report::DiskRests);
        let id = bench.write(3, vec![]);
        let answer = bench.report();
        assert!(
            [Fault::Resting, fault].map(|fault| Report::Ended(id, Err(fault))).contains(&answer),
            "{answer:?}"
        );
        bench.disk.set(Mood::Well);
        assert_eq!(bench.report(), Report::DiskIsBack);
        let id = bench.write(3, vec![]);
        assert_eq!(bench.report(), Report::Ended(id, Ok(())));
    }
}

#[test]
fn a_load_from_a_hanging_disk_is_given_up_and_its_block_is_never_written() {
    let mut bench = bench(Pace { load_patience: Duration::from_millis(20), ..Pace::default() });
    bench.store(3);
    bench.write(3, vec![]);
    bench.report();
    bench.disk.set(Mood::Hanging);
    let ids: Vec<_> = (0..5).map(|_| bench.load(3, FILE, 0)).collect();
    let mut slow: Vec<_> = (0..5).map(|_| bench.report()).collect();
    slow.sort_by_key(|report| match report {
        Report::Ended(id, _) => id.0,
        Report::DiskRests | Report::DiskIsBack => 0,
    });
    assert_eq!(slow, ids.iter().map(|&id| Report::Ended(id, Err(Fault::Slow))).collect::<Vec<_>>());
    // The host tier still works while both readers hang.
    let id = bench.load(3, Source::Host(HostSlot(3)), 2);
    assert_eq!(bench.report(), Report::Ended(id, Ok(())));
    bench.device.write_block(BlockId(0), &[0x77; BYTES]);
    bench.disk.set(Mood::Well);
    let id = bench.load(3, FILE, 1);
    assert_eq!(bench.report(), Report::Ended(id, Ok(())));
    assert_eq!(bench.device.read_block(BlockId(0)), [0x77; BYTES], "it was somebody else's by then");
}

#[test]
fn an_order_is_revoked_before_its_commitment_point_or_answered_after_it() {
    let mut bench = bench(Pace::default());
    bench.store(3);
    bench.write(3, vec![]);
    bench.report();
    bench.disk.set(Mood::Hanging);
    let ids: Vec<_> = (0..4).map(|_| bench.load(3, FILE, 0)).collect();
    // Two are being read, two wait; none has touched the device, and all can be had back.
    for id in ids {
        assert!(bench.workers.revoke(id));
        assert!(!bench.workers.revoke(id), "once");
    }
    bench.device.write_block(BlockId(0), &[0x77; BYTES]);
    bench.disk.set(Mood::Well);
    let id = bench.load(3, FILE, 1);
    assert_eq!(bench.report(), Report::Ended(id, Ok(())), "nothing was reported of those");
    assert_eq!(bench.device.read_block(BlockId(0)), [0x77; BYTES]);
    assert!(!bench.workers.revoke(id), "it is over");
}

#[test]
fn a_worker_outlives_a_job_that_panics_and_answers_for_it() {
    let mut bench = bench(Pace::default());
    bench.store(3);
    bench.disk.set(Mood::Panicking);
    for _ in 0..4 {
        let id = bench.write(3, vec![]);
        assert_eq!(bench.report(), Report::Ended(id, Err(Fault::Broken)));
        let id = bench.load(3, FILE, 0);
        assert_eq!(bench.report(), Report::Ended(id, Err(Fault::Broken)));
    }
    bench.disk.set(Mood::Well);
    let id = bench.write(3, vec![]);
    assert_eq!(bench.report(), Report::Ended(id, Ok(())));
}

#[test]
fn a_full_queue_refuses_and_a_stopped_one_too() {
    let mut bench = bench(Pace::default());
    bench.store(3);
    bench.disk.set(Mood::Hanging);
    let mut taken = 0;
    for _ in 0..QUEUE_MAX + 2 {
        let id = bench.id();
        let order = Order::Write { id, hash: hash(3), slot: HostSlot(3), evict: vec![] };
        taken += usize::from(bench.workers.order(order));
    }
    assert!((QUEUE_MAX..=QUEUE_MAX + 1).contains(&taken), "one may be in the worker's hands: {taken}");
    bench.workers.shutdown(Instant::now());
    let id = bench.id();
    assert!(!bench.workers.order(Order::Store { id, hash: hash(1), block: BlockId(1), slot: HostSlot(1) }));
    bench.disk.set(Mood::Well);
}
