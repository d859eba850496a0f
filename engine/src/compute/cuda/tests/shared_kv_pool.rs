//! The shared KV pool: which threads wait for which copies.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::*;

/// A pool whose copies begin and end when the test releases them.
#[derive(Debug)]
struct GatedMemory {
    begun: SyncSender<()>,
    end: Mutex<Receiver<()>>,
    events: Arc<Mutex<Vec<&'static str>>>,
}

impl PoolMemory for GatedMemory {
    fn export(&self) -> io::Result<PoolExport> {
        Err(ErrorKind::Unsupported.into())
    }

    fn open(&self, _: &Offer, _: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>> {
        Err(ErrorKind::Unsupported.into())
    }

    fn copy_in(&self, _: &[HostRun], _: &Region) -> Result<(), DeviceError> {
        lock(&self.events).push("loaded");
        Ok(())
    }

    fn copy_out(&self, _: &[HostRun], _: &Region) -> Result<(), DeviceError> {
        self.begun.send(()).expect("the test waits");
        lock(&self.end).recv().expect("the test lets the copy end");
        lock(&self.events).push("copied");
        Ok(())
    }
}

/// Another process's pool, from which no copy ends.
#[derive(Debug)]
struct StuckPool;

impl ImportedPool for StuckPool {
    fn copy(&self, _: &[CopyRun], _: &Region) -> io::Result<()> {
        Err(io::Error::other(DeviceError::Hung { what: "a copy", waited: Duration::from_secs(60) }))
    }
}

#[test]
fn a_hung_copy_from_a_peer_pool_disables_the_local_device() {
    let ((begun, _has_begun), (_go, end)) = (sync_channel(0), sync_channel(0));
    let memory = GatedMemory { begun, end: Mutex::new(end), events: Arc::default() };
    let region = Region::allocate(4, 64);
    let pool = SharedKvPool::new(Arc::new(memory), region.clone());
    let failure = pool.failure.clone();
    let landing = PeerPool { opened: Box::new(StuckPool), region: region.clone(), failure };
    assert!(pool.usable().is_ok());
    assert!(landing.copy(&[], &region).is_err());
    let why = pool.usable().unwrap_err().to_string();
    assert!(why.contains("a copy not completed after 60 s"), "{why}");
    // The device gets no more calls. A call would wait for the test forever.
    pool.mirror().mark_device_newer(BlockId(1));
    pool.mirror().mark_leased([BlockId(1)].into_iter());
    assert!(pool.download(&[BlockId(1)]).is_err());
}

/// A pool whose block 1 is leased and not copied yet, and the begin and the end of its copy.
fn pool_with_lease(
    events: &Arc<Mutex<Vec<&'static str>>>,
) -> (SharedKvPool, [BlockId; 1], Receiver<()>, SyncSender<()>) {
    let ((begun, has_begun), (go, end)) = (sync_channel(0), sync_channel(0));
    let memory = GatedMemory { begun, end: Mutex::new(end), events: Arc::clone(events) };
    let (pool, leased) = (SharedKvPool::new(Arc::new(memory), Region::allocate(4, 64)), [BlockId(1)]);
    pool.mirror().mark_device_newer(leased[0]);
    pool.mirror().mark_leased(leased.into_iter());
    (pool, leased, has_begun, go)
}

#[test]
fn a_landing_waits_for_the_previous_owners_download() {
    let events = Arc::<Mutex<Vec<&'static str>>>::default();
    let (pool, leased, has_begun, go) = pool_with_lease(&events);
    std::thread::scope(|scope| {
        scope.spawn(|| pool.download(&leased).expect("the block is copied"));
        has_begun.recv().expect("the copy begins");
        // The lease has ended. Reserving its block does not wait. Another block may be written, this one not yet.
        pool.reserve(&leased);
        assert!(pool.mirror().is_in_flight(&leased));
        pool.wait_for_downloads(&[BlockId(2)]).expect("block 2 is not in download");
        let landing = scope.spawn(|| {
            pool.wait_for_downloads(&leased).expect("the copy ends");
            lock(&events).push("landed");
        });
        go.send(()).expect("the copy waits");
        landing.join().expect("no panic");
    });
    assert_eq!(*lock(&events), ["copied", "landed"]);
    assert!(!pool.mirror().is_in_flight(&leased));
    assert_eq!(pool.mirror().pending_uploads(&leased), leased, "the landed block is to be uploaded");
}

#[test]
fn waits_for_a_download_end_when_the_pool_is_closed() {
    let (pool, leased, has_begun, go) = pool_with_lease(&Arc::default());
    std::thread::scope(|scope| {
        // Dropped when an assertion fails, so that the copy ends.
        let go = go;
        scope.spawn(|| pool.download(&leased));
        has_begun.recv().expect("the copy begins");
        let landing = scope.spawn(|| pool.wait_for_downloads(&leased));
        let loading = scope.spawn(|| pool.load(pool.region(), BlockId(0), leased[0]));
        pool.close();
        for waited in [landing, loading] {
            let ended = waited.join().expect("no panic");
            assert!(matches!(ended, Err(DeviceError::Closed)), "{ended:?}");
        }
        pool.wait_for_downloads(&[BlockId(2)]).expect("block 2 is not in download");
        go.send(()).expect("the copy waits");
    });
    assert!(pool.usable().is_ok(), "the device is still usable");
}

#[test]
fn a_load_waits_for_the_previous_owners_download() {
    let events = Arc::<Mutex<Vec<&'static str>>>::default();
    let (pool, leased, has_begun, go) = pool_with_lease(&events);
    std::thread::scope(|scope| {
        let go = go;
        scope.spawn(|| pool.download(&leased).expect("the block is copied"));
        has_begun.recv().expect("the copy begins");
        // The lease has ended, and a tier has the bytes of the block's next owner.
        pool.reserve(&leased);
        let loading = scope.spawn(|| pool.load(pool.region(), BlockId(0), leased[0]));
        go.send(()).expect("the copy waits");
        loading.join().expect("no panic").expect("the block is loaded");
    });
    assert_eq!(*lock(&events), ["copied", "loaded"]);
}

#[test]
fn a_publication_skips_a_block_during_the_previous_owners_download() {
    let events = Arc::<Mutex<Vec<&'static str>>>::default();
    let (pool, leased, has_begun, go) = pool_with_lease(&events);
    std::thread::scope(|scope| {
        scope.spawn(|| pool.download(&leased).expect("the block is copied"));
        has_begun.recv().expect("the copy begins");
        // The lease has ended past its drain deadline. The block has another prompt's tokens and is published.
        pool.mirror().mark_device_newer(leased[0]);
        let plan = pool.begin_sync(&[BlockId(1), BlockId(2)]).expect("the publication does not wait");
        assert_eq!((&plan.blocks[..], plan.downloads.len(), plan.uploads.len()), (&[BlockId(2)][..], 0, 0));
        pool.end_sync(&plan, &Ok(()));
        go.send(()).expect("the copy waits");
    });
    let plan = pool.begin_sync(&leased).expect("the copy has ended");
    assert_eq!(
        (plan.downloads.as_slice(), &plan.uploads[..]),
        (&leased[..], &[][..]),
        "the block of the other prompt is downloaded"
    );
    pool.end_sync(&plan, &Ok(()));
    assert_eq!(*lock(&events), ["copied"]);
    assert!(pool.mirror().pending_downloads(&leased).is_empty() && !pool.mirror().is_in_flight(&leased));
}

#[test]
fn a_block_in_publication_is_not_downloaded_again() {
    let (pool, leased, has_begun, _go) = pool_with_lease(&Arc::default());
    let plan = pool.begin_sync(&leased).expect("no download is in flight");
    // A copy would panic, because the receiver of its begin signal is dropped.
    drop(has_begun);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| pool.download(&leased));
        pool.end_sync(&plan, &Ok(()));
        reading.join().expect("no copy").expect("the mirror has the block");
    });
}

#[test]
fn a_download_that_exceeds_its_timeout_disables_the_device() {
    let (pool, leased, has_begun, go) = pool_with_lease(&Arc::default());
    let pool = pool.with_copy_timeout(Duration::ZERO);
    std::thread::scope(|scope| {
        let go = go;
        scope.spawn(|| pool.download(&leased));
        has_begun.recv().expect("the copy begins");
        let why = pool.wait_for_downloads(&leased).unwrap_err().to_string();
        assert!(why.contains("host memory not completed") && pool.usable().is_err(), "{why}");
        go.send(()).expect("the copy waits");
    });
}
