//! The offload threads with disks that work, fail, are full, hang and recover.

use std::collections::HashMap;
use std::io;
use std::sync::mpsc::Receiver;

use baton_connector::region::Region;

use super::super::disk::Volume;
use super::super::host_arena::TieredPool;
use super::super::record::TierIdentity;
use super::*;

const BYTES: usize = 64;
const REPORT_TIMEOUT: Duration = Duration::from_secs(60);

/// The behavior of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskBehavior {
    Healthy,
    Full,
    Broken,
    Hanging,
    Panicking,
}

struct DiskFiles {
    state: Mutex<(DiskBehavior, HashMap<BlockHash, Vec<u8>>)>,
    changed: Condvar,
}

#[derive(Clone)]
struct ScriptedDisk(Arc<DiskFiles>);

impl ScriptedDisk {
    fn new() -> Self {
        Self(Arc::new(DiskFiles {
            state: Mutex::new((DiskBehavior::Healthy, HashMap::new())),
            changed: Condvar::new(),
        }))
    }

    fn set(&self, behavior: DiskBehavior) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).0 = behavior;
        self.0.changed.notify_all();
    }

    fn with<T>(&self, act: impl FnOnce(&mut HashMap<BlockHash, Vec<u8>>) -> T) -> io::Result<T> {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.0 == DiskBehavior::Hanging {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match state.0 {
            DiskBehavior::Healthy => Ok(act(&mut state.1)),
            DiskBehavior::Full => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            DiskBehavior::Broken => Err(io::Error::from_raw_os_error(libc::EIO)),
            DiskBehavior::Panicking => panic!("a disk that makes a worker panic"),
            DiskBehavior::Hanging => unreachable!("waited for"),
        }
    }
}

impl Volume for ScriptedDisk {
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

struct WorkerBench {
    workers: OffloadWorkers,
    device: Region,
    disk: ScriptedDisk,
    reports: Receiver<OffloadReport>,
    next: u64,
}

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 32])
}

fn bench(timeouts: WorkerTimeouts) -> WorkerBench {
    let (device, disk) = (Region::allocate(8, BYTES), ScriptedDisk::new());
    for n in 0..8 {
        device.write_block(BlockId(n), &[n as u8; BYTES]);
    }
    let (sender, reports) = sync_channel(1024);
    let tier = DiskTier::new(Box::new(disk.clone()), TierIdentity { layout: 1, model: [0; 16] }, BYTES);
    let arena = HostArena::new(8, TieredPool::Host(vec![device.clone()]));
    let workers = OffloadWorkers::start(arena, Some(tier), timeouts, move |report| {
        sender.send(report).expect("the test listens")
    });
    WorkerBench { workers: workers.expect("threads"), device, disk, reports, next: 0 }
}

impl WorkerBench {
    fn id(&mut self) -> TransferId {
        self.next += 1;
        TransferId(self.next)
    }

    fn report(&self) -> OffloadReport {
        self.reports.recv_timeout(REPORT_TIMEOUT).expect("a report")
    }

    fn store(&mut self, n: u8) -> OffloadReport {
        let id = self.id();
        assert!(self.workers.submit(OffloadOrder::Store {
            id,
            hash: hash(n),
            block: BlockId(n.into()),
            slot: HostSlot(n.into())
        }));
        self.report()
    }

    fn write(&mut self, n: u8, evict: Vec<BlockHash>) -> TransferId {
        let id = self.id();
        assert!(self.workers.submit(OffloadOrder::Write {
            id,
            hash: hash(n),
            slot: HostSlot(n.into()),
            evict
        }));
        id
    }

    fn load(&mut self, n: u8, from: LoadSource, block: u32) -> TransferId {
        let id = self.id();
        assert!(self.workers.submit(OffloadOrder::Load { id, hash: hash(n), from, block: BlockId(block) }));
        id
    }
}

const FILE: LoadSource = LoadSource::Disk { slot: None };

#[test]
fn a_block_is_offloaded_to_disk_and_loaded_back() {
    let mut bench = bench(WorkerTimeouts::default());
    assert!(matches!(bench.store(3), OffloadReport::Ended(_, Ok(()))));
    let id = bench.write(3, vec![]);
    assert_eq!(bench.report(), OffloadReport::Ended(id, Ok(())));
    let id = bench.load(3, LoadSource::Disk { slot: Some(HostSlot(5)) }, 0);
    assert_eq!(bench.report(), OffloadReport::Ended(id, Ok(())));
    assert_eq!(bench.device.read_block(BlockId(0)), [3; BYTES]);
    let id = bench.load(3, LoadSource::Host(HostSlot(5)), 1);
    assert_eq!(bench.report(), OffloadReport::Ended(id, Ok(())));
    assert_eq!(bench.device.read_block(BlockId(1)), [3; BYTES]);
}

#[test]
fn a_file_that_is_missing_or_damaged_never_reaches_the_device() {
    let mut bench = bench(WorkerTimeouts::default());
    bench.store(3);
    bench.write(3, vec![]);
    bench.report();
    bench.disk.with(|files| files.get_mut(&hash(3)).expect("written")[HEADER_BYTES + 7] ^= 4).expect("well");
    for fault in [OffloadFault::Corrupt, OffloadFault::Missing] {
        let id = bench.load(3, FILE, 0);
        assert_eq!(bench.report(), OffloadReport::Ended(id, Err(fault)));
        assert_eq!(bench.device.read_block(BlockId(0)), [0; BYTES]);
    }
}

#[test]
fn a_full_or_broken_disk_is_suspended_until_it_works() {
    for (behavior, fault) in
        [(DiskBehavior::Full, OffloadFault::Full), (DiskBehavior::Broken, OffloadFault::Io)]
    {
        let mut bench =
            bench(WorkerTimeouts { disk_suspension: Duration::from_millis(20), ..WorkerTimeouts::default() });
        bench.store(3);
        bench.disk.set(behavior);
        for _ in 0..3 {
            let id = bench.write(3, vec![hash(9)]);
            assert_eq!(bench.report(), OffloadReport::Ended(id, Err(fault)));
        }
        assert_eq!(bench.report(), OffloadReport::DiskSuspended);
        let id = bench.write(3, vec![]);
        let answer = bench.report();
        assert!(
            [OffloadFault::Suspended, fault]
                .map(|fault| OffloadReport::Ended(id, Err(fault)))
                .contains(&answer),
            "{answer:?}"
        );
        bench.disk.set(DiskBehavior::Healthy);
        assert_eq!(bench.report(), OffloadReport::DiskResumed);
        let id = bench.write(3, vec![]);
        assert_eq!(bench.report(), OffloadReport::Ended(id, Ok(())));
    }
}

#[test]
fn a_load_from_a_hanging_disk_is_given_up_and_its_block_is_never_written() {
    let mut bench =
        bench(WorkerTimeouts { load_timeout: Duration::from_millis(20), ..WorkerTimeouts::default() });
    bench.store(3);
    bench.write(3, vec![]);
    bench.report();
    bench.disk.set(DiskBehavior::Hanging);
    let ids: Vec<_> = (0..5).map(|_| bench.load(3, FILE, 0)).collect();
    let mut slow: Vec<_> = (0..5).map(|_| bench.report()).collect();
    slow.sort_by_key(|report| match report {
        OffloadReport::Ended(id, _) => id.0,
        OffloadReport::DiskSuspended | OffloadReport::DiskResumed => 0,
    });
    assert_eq!(
        slow,
        ids.iter().map(|&id| OffloadReport::Ended(id, Err(OffloadFault::Slow))).collect::<Vec<_>>()
    );
    // The host tier still works while both readers hang.
    let id = bench.load(3, LoadSource::Host(HostSlot(3)), 2);
    assert_eq!(bench.report(), OffloadReport::Ended(id, Ok(())));
    bench.device.write_block(BlockId(0), &[0x77; BYTES]);
    bench.disk.set(DiskBehavior::Healthy);
    let id = bench.load(3, FILE, 1);
    assert_eq!(bench.report(), OffloadReport::Ended(id, Ok(())));
    assert_eq!(bench.device.read_block(BlockId(0)), [0x77; BYTES], "another request holds the block by then");
}

#[test]
fn an_order_is_revoked_before_its_commitment_point_or_completed_after() {
    let mut bench = bench(WorkerTimeouts::default());
    bench.store(3);
    bench.write(3, vec![]);
    bench.report();
    bench.disk.set(DiskBehavior::Hanging);
    let ids: Vec<_> = (0..4).map(|_| bench.load(3, FILE, 0)).collect();
    // Two are being read and two wait. None has written to the device, and all can be revoked.
    for id in ids {
        assert!(bench.workers.revoke(id));
        assert!(!bench.workers.revoke(id), "once");
    }
    bench.device.write_block(BlockId(0), &[0x77; BYTES]);
    bench.disk.set(DiskBehavior::Healthy);
    let id = bench.load(3, FILE, 1);
    assert_eq!(bench.report(), OffloadReport::Ended(id, Ok(())), "nothing was reported of those");
    assert_eq!(bench.device.read_block(BlockId(0)), [0x77; BYTES]);
    assert!(!bench.workers.revoke(id), "it is over");
}

#[test]
fn a_worker_outlives_a_job_that_panics_and_answers_for_it() {
    let mut bench = bench(WorkerTimeouts::default());
    bench.store(3);
    bench.disk.set(DiskBehavior::Panicking);
    for _ in 0..4 {
        let id = bench.write(3, vec![]);
        assert_eq!(bench.report(), OffloadReport::Ended(id, Err(OffloadFault::Broken)));
        let id = bench.load(3, FILE, 0);
        assert_eq!(bench.report(), OffloadReport::Ended(id, Err(OffloadFault::Broken)));
    }
    bench.disk.set(DiskBehavior::Healthy);
    let id = bench.write(3, vec![]);
    assert_eq!(bench.report(), OffloadReport::Ended(id, Ok(())));
}

#[test]
fn a_full_queue_refuses_and_a_stopped_one_too() {
    let mut bench = bench(WorkerTimeouts::default());
    bench.store(3);
    bench.disk.set(DiskBehavior::Hanging);
    let mut taken = 0;
    for _ in 0..QUEUE_MAX + 2 {
        let id = bench.id();
        let order = OffloadOrder::Write { id, hash: hash(3), slot: HostSlot(3), evict: vec![] };
        taken += usize::from(bench.workers.submit(order));
    }
    assert!((QUEUE_MAX..=QUEUE_MAX + 1).contains(&taken), "one may be in the worker's hands: {taken}");
    bench.workers.shutdown(Instant::now());
    let id = bench.id();
    assert!(!bench.workers.submit(OffloadOrder::Store {
        id,
        hash: hash(1),
        block: BlockId(1),
        slot: HostSlot(1)
    }));
    bench.disk.set(DiskBehavior::Healthy);
}
