//! The port: who waits for whose copies.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::*;

/// A pool whose copies begin and end when the test says so.
#[derive(Debug)]
struct Gated {
    begun: SyncSender<()>,
    end: Mutex<Receiver<()>>,
    told: Arc<Mutex<Vec<&'static str>>>,
}

impl PoolMemory for Gated {
    fn export(&self) -> io::Result<Export> {
        Err(ErrorKind::Unsupported.into())
    }

    fn open(&self, _: &Offer, _: Option<OwnedFd>) -> io::Result<Box<dyn Opened>> {
        Err(ErrorKind::Unsupported.into())
    }

    fn copy_in(&self, _: &[HostRun], _: &Region) -> Result<(), DeviceError> {
        lock(&self.told).push("loaded");
        Ok(())
    }

    fn copy_out(&self, _: &[HostRun], _: &Region) -> Result<(), DeviceError> {
        self.begun.send(()).expect("the test waits");
        lock(&self.end).recv().expect("the test goes on");
        lock(&self.told).push("copied");
        Ok(())
    }
}

/// Another process's memory, from which no copy ends.
#[derive(Debug)]
struct Stuck;

impl Opened for Stuck {
    fn copy(&self, _: &[Run], _: &Region) -> io::Result<()> {
        Err(io::Error::other(DeviceError::Hung { what: "a copy", waited: Duration::from_secs(60) }))
    }
}

#[test]
fn a_copy_from_another_device_that_hangs_gives_ours_up_before_its_reader_hears_of_it() {
    let ((begun, _has_begun), (_go, end)) = (sync_channel(0), sync_channel(0));
    let memory = Gated { begun, end: Mutex::new(end), told: Arc::default() };
    let region = Region::allocate(4, 64);
    let port = Port::new(Arc::new(memory), region.clone());
    let given_up = port.given_up.clone();
    let landing = Landing { opened: Box::new(Stuck), region: region.clone(), given_up };
    assert!(port.usable().is_ok());
    assert!(landing.copy(&[], &region).is_err());
    let why = port.usable().unwrap_err().to_string();
    assert!(why.contains("a copy not completed after 60 s"), "{why}");
    // Nothing is asked of the device any more; this one would wait for the test for ever.
    port.mirror().computed(BlockId(1));
    port.mirror().lend([BlockId(1)].into_iter());
    assert!(port.in_region(&[BlockId(1)]).is_err());
}

/// A port whose block 1 is lent and not copied yet, and the begin and the end of its copy.
fn lending(told: &Arc<Mutex<Vec<&'static str>>>) -> (Port, [BlockId; 1], Receiver<()>, SyncSender<()>) {
    let ((begun, has_begun), (go, end)) = (sync_channel(0), sync_channel(0));
    let memory = Gated { begun, end: Mutex::new(end), told: Arc::clone(told) };
    let (port, lent) = (Port::new(Arc::new(memory), Region::allocate(4, 64)), [BlockId(1)]);
    port.mirror().computed(lent[0]);
    port.mirror().lend(lent.into_iter());
    (port, lent, has_begun, go)
}

#[test]
fn nothing_lands_in_a_block_whose_last_owners_copy_is_under_way() {
    let told = Arc::<Mutex<Vec<&'static str>>>::default();
    let (port, lent, has_begun, go) = lending(&told);
    std::thread::scope(|scope| {
        scope.spawn(|| port.in_region(&lent).expect("it is copied"));
        has_begun.recv().expect("it begins");
        // Its lease has ended. Setting it aside waits for nothing; another block may be written, this one not yet.
        port.landing(&lent);
        assert!(port.mirror().is_in_flight(&lent));
        port.quiet(&[BlockId(2)]).expect("nothing is copied there");
        let landing = scope.spawn(|| {
            port.quiet(&lent).expect("the copy ends");
            lock(&told).push("landed");
        });
        go.send(()).expect("it waits");
        landing.join().expect("no panic");
    });
    assert_eq!(*lock(&told), ["copied", "landed"]);
    assert!(!port.mirror().is_in_flight(&lent));
    assert_eq!(port.mirror().on_host(&lent), lent, "what has landed counts");
}

#[test]
fn who_waits_for_a_copy_is_let_go_when_the_engine_ends() {
    let (port, lent, has_begun, go) = lending(&Arc::default());
    std::thread::scope(|scope| {
        // Let go of when an assertion fails, so that the copy ends.
        let go = go;
        scope.spawn(|| port.in_region(&lent));
        has_begun.recv().expect("it begins");
        let landing = scope.spawn(|| port.quiet(&lent));
        let loading = scope.spawn(|| port.load(port.region(), BlockId(0), lent[0]));
        port.close();
        for waited in [landing, loading] {
            let ended = waited.join().expect("no panic");
            assert!(matches!(ended, Err(DeviceError::Closed)), "{ended:?}");
        }
        port.quiet(&[BlockId(2)]).expect("nothing is copied there");
        go.send(()).expect("it waits");
    });
    assert!(port.usable().is_ok(), "the device is none the worse for it");
}

#[test]
fn nothing_is_loaded_into_a_block_whose_last_owners_copy_is_under_way() {
    let told = Arc::<Mutex<Vec<&'static str>>>::default();
    let (port, lent, has_begun, go) = lending(&told);
    std::thread::scope(|scope| {
        let go = go;
        scope.spawn(|| port.in_region(&lent).expect("it is copied"));
        has_begun.recv().expect("it begins");
        // Its lease has ended, and a tier has the next owner's bytes.
        port.landing(&lent);
        let loading = scope.spawn(|| port.load(port.region(), BlockId(0), lent[0]));
        go.send(()).expect("it waits");
        loading.join().expect("no panic").expect("it is loaded");
    });
    assert_eq!(*lock(&told), ["copied", "loaded"]);
}

#[test]
fn nothing_is_published_of_a_block_whose_last_owners_copy_is_under_way() {
    let told = Arc::<Mutex<Vec<&'static str>>>::default();
    let (port, lent, has_begun, go) = lending(&told);
    std::thread::scope(|scope| {
        scope.spawn(|| port.in_region(&lent).expect("it is copied"));
        has_begun.recv().expect("it begins");
        // Its lease has ended past its drain deadline; another prompt has computed it and it is published.
        port.mirror().computed(lent[0]);
        let level = port.begin_level(&[BlockId(1), BlockId(2)]).expect("it waits for no copy");
        assert_eq!((&level.level[..], level.down.len(), level.up.len()), (&[BlockId(2)][..], 0, 0));
        port.end_level(&level, &Ok(()));
        go.send(()).expect("it waits");
    });
    let level = port.begin_level(&lent).expect("the copy has ended");
    assert_eq!(
        (level.down.as_slice(), &level.up[..]),
        (&lent[..], &[][..]),
        "the mirror has the other prompt's"
    );
    port.end_level(&level, &Ok(()));
    assert_eq!(*lock(&told), ["copied"]);
    assert!(port.mirror().to_host(&lent).is_empty() && !port.mirror().is_in_flight(&lent));
}

#[test]
fn what_is_published_is_not_copied_for_readers_meanwhile_nor_afterwards() {
    let (port, lent, has_begun, _go) = lending(&Arc::default());
    let level = port.begin_level(&lent).expect("no copy is under way");
    // A copy would panic: the receiver of its beginning is gone.
    drop(has_begun);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| port.in_region(&lent));
        port.end_level(&level, &Ok(()));
        reading.join().expect("no copy").expect("the mirror has it");
    });
}

#[test]
fn a_copy_that_does_not_end_is_not_waited_for_for_ever() {
    let (port, lent, has_begun, go) = lending(&Arc::default());
    let port = port.with_patience(Duration::ZERO);
    std::thread::scope(|scope| {
        let go = go;
        scope.spawn(|| port.in_region(&lent));
        has_begun.recv().expect("it begins");
        let why = port.quiet(&lent).unwrap_err().to_string();
        assert!(why.contains("host memory not completed") && port.usable().is_err(), "{why}");
        go.send(()).expect("it waits");
    });
}
