//! The reports of a lease's end: one log line and one count for each expiry, and no line for other ends.

use std::fmt::Write as _;

use baton_connector::Rank;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

use super::*;

/// Records every warning and error, with its fields and those of its span.
#[derive(Clone, Default)]
struct LogCapture {
    lines: Arc<Mutex<Vec<String>>>,
    /// By id.
    spans: Arc<Mutex<Vec<String>>>,
}

struct LogLine(String);

impl Visit for LogLine {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, "{}={value:?} ", field.name()).expect("a string takes everything");
    }
}

impl Subscriber for LogCapture {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut line = LogLine(String::new());
        span.record(&mut line);
        let mut spans = self.spans.lock().expect("no panic");
        spans.push(line.0);
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let spans = self.spans.lock().expect("no panic");
        let span = event.parent().map(|id| spans[id.into_u64() as usize - 1].clone());
        let mut line = LogLine(span.unwrap_or_default());
        event.record(&mut line);
        self.lines.lock().expect("no panic").push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Records the calls of the service.
#[derive(Default)]
struct RecordedOwner {
    opened: Mutex<Vec<(usize, bool)>>,
    counted: Mutex<Vec<CloseCause>>,
    closed: Mutex<Vec<ClosedLease>>,
    unfinished: Mutex<Vec<Handle>>,
}

impl LeaseOwner for RecordedOwner {
    fn lease_opened(&self, blocks: usize, growing: bool) {
        self.opened.lock().expect("no panic").push((blocks, growing));
    }

    fn count_closed(&self, lease: &ClosedLease) {
        self.counted.lock().expect("no panic").push(lease.cause);
    }

    fn leases_closed(&self, closed: Vec<ClosedLease>) {
        self.closed.lock().expect("no panic").extend(closed);
    }

    fn leases_unfinished(&self, handles: Vec<Handle>) {
        self.unfinished.lock().expect("no panic").extend(handles);
    }
}

fn grant(handle: u128, expected: usize) -> LeaseSpec {
    LeaseSpec {
        handle: Handle(handle),
        request: RequestId::new(&format!("request-{handle}")).expect("an id"),
        blocks: vec![BlockId(0), BlockId(1), BlockId(2)],
        expected,
    }
}

#[test]
fn only_an_expiry_logs_one_line_and_counts_once() {
    let terms = LeaseTerms { duration: Duration::from_millis(500), ..LeaseTerms::default() };
    let owner = Arc::new(RecordedOwner::default());
    let log = RankLog::new(&Arc::default(), 0);
    let service = LeaseService::new(terms, Epoch(1), 2, Arc::<RecordedOwner>::clone(&owner), log);
    let logs = LogCapture::default();
    tracing::subscriber::with_default(logs.clone(), || {
        for (handle, expected) in [(1, 2), (2, 1), (3, 1)] {
            service.open(grant(handle, expected)).expect("room for three");
        }
        // One of the first's two readers finishes; the second is released, the third is fetched.
        for (handle, consumer) in [(1, 7), (3, 8)] {
            let reader = Reader { consumer, rank: Rank(0), of: 1 };
            service.begin_read(Handle(handle), reader, 0, 3).expect("it is live");
            assert_eq!(service.finish_read(Handle(handle), reader), Verdict::Valid);
        }
        assert_eq!(service.release(Handle(2), "router_release"), ReleaseReply::Released);
        // The timer holds the ledger while it calls `stop`, so its effect is read from the owner.
        service.run_timer(|| owner.counted.lock().expect("no panic").contains(&CloseCause::Expired));
        // Late messages change nothing and log nothing more.
        assert_eq!(service.release(Handle(1), "late"), ReleaseReply::Already);
        assert_eq!(service.heartbeat(Handle(1)), HeartbeatReply::Gone);
    });
    let lines = logs.lines.lock().expect("no panic").clone();
    let [line] = &lines[..] else { panic!("{lines:#?}") };
    assert!(line.starts_with("handle=00000000 "), "a part of the secret: {line}");
    for part in [
        "lease expired",
        "event=\"lease_expired\" ",
        "request=request-1 ",
        "done=1 ",
        "expected=2 ",
        "blocks=3 ",
        "held=0.",
    ] {
        assert!(line.contains(part), "{part:?} is not in {line}");
    }
    assert_eq!(*owner.opened.lock().expect("no panic"), [(3, false); 3]);
    let causes = [CloseCause::Fetched, CloseCause::Released, CloseCause::Expired];
    assert_eq!(*owner.counted.lock().expect("no panic"), causes, "each end counts once");
    let closed = owner.closed.lock().expect("no panic");
    let ends: Vec<_> = closed.iter().map(|lease| (lease.handle, lease.cause)).collect();
    assert_eq!(ends, [3, 2, 1].map(Handle).into_iter().zip(causes).collect::<Vec<_>>());
    let settled: usize = closed.iter().map(|lease| lease.blocks.len()).sum();
    assert_eq!(settled, 9, "every block of the three was freed once");
    assert!(owner.unfinished.lock().expect("no panic").is_empty(), "every prefill had ended");
}
