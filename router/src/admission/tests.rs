//! Tests of the async queue: no waiting request is forgotten, and no request that left delays the others.

use std::sync::atomic::AtomicBool;

use super::*;
use crate::auth::TenantId;

struct TestEngines {
    metrics: Arc<AdmissionMetrics>,
    capacity: Arc<AtomicUsize>,
    notify: Arc<CapacityNotify>,
    queue: Arc<ModelQueue>,
}

/// A reservation at an engine. Dropping it frees the capacity.
struct TestReservation(Arc<AtomicUsize>, Arc<CapacityNotify>);

impl Reservation for TestReservation {}
impl Reservation for () {}

impl Drop for TestReservation {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        self.1.notify();
    }
}

impl TestEngines {
    fn new(capacity: usize) -> Self {
        let notify = Arc::<CapacityNotify>::default();
        let metrics = Arc::new(AdmissionMetrics::new(&crate::metrics::Registry::default()));
        let admission = Admission::new(Arc::clone(&notify), Arc::clone(&metrics));
        Self {
            metrics,
            capacity: Arc::new(AtomicUsize::new(capacity)),
            notify,
            queue: admission.queue("m", Leg::Decode),
        }
    }

    fn reserve(&self) -> impl FnMut() -> Result<TestReservation, Unavailable> + Send + 'static {
        let (capacity, notify) = (Arc::clone(&self.capacity), Arc::clone(&self.notify));
        move || {
            let taken = capacity.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |free| free.checked_sub(1));
            taken
                .map(|_| TestReservation(Arc::clone(&capacity), Arc::clone(&notify)))
                .map_err(|_| Unavailable::Full)
        }
    }

    async fn enter(&self, ticket: AdmissionRequest) -> Result<TestReservation, ApiError> {
        self.queue.enter(ticket, WaitOptions::default(), &terms(), self.reserve()).await.map_err(|refused| {
            assert_eq!(refused.cause, Unavailable::Full);
            refused.error
        })
    }
}

fn terms() -> QueueConfig {
    QueueConfig { requests: 2000, tenant_requests: 1000, ..QueueConfig::default() }
}

fn ticket(tenant: u32) -> AdmissionRequest {
    let claim =
        Claim { tenant: Some(TenantId(tenant)), weight: 1, priority: Priority::Normal, bytes: 1, cost: 1 };
    AdmissionRequest {
        claim,
        deadline: Instant::now() + Duration::from_secs(60),
        request_deadline: None,
        response: ResponseDeadlines::default(),
    }
}

#[tokio::test]
async fn with_free_capacity_no_request_queues() {
    let engines = TestEngines::new(2);
    let reservations = (engines.enter(ticket(1)).await.unwrap(), engines.enter(ticket(1)).await.unwrap());
    assert_eq!(engines.queue.waiting.load(Ordering::SeqCst), 0);
    drop(reservations);
}

#[tokio::test]
async fn a_waiting_request_gets_freed_capacity() {
    let engines = TestEngines::new(1);
    let reservation = engines.enter(ticket(1)).await.unwrap();
    let mut second = Box::pin(engines.enter(ticket(1)));
    assert!(futures_poll(&mut second).await.is_none());
    drop(reservation);
    assert!(second.await.is_ok());
}

/// Polls once.
async fn futures_poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    std::future::poll_fn(|context| {
        std::task::Poll::Ready(match std::pin::Pin::new(&mut *future).poll(context) {
            std::task::Poll::Ready(done) => Some(done),
            std::task::Poll::Pending => None,
        })
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_request_is_served_under_hundreds_of_waits_and_cancels() {
    let engines = Arc::new(TestEngines::new(3));
    let (busy, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..600_u32 {
        let (engines, busy, over) = (Arc::clone(&engines), Arc::clone(&busy), Arc::clone(&over));
        tasks.spawn(async move {
            let entered = engines.enter(ticket(n % 7));
            if n % 5 == 0 {
                // Cancelled after a few polls, wherever that is.
                let mut entered = Box::pin(entered);
                for _ in 0..n % 4 {
                    if futures_poll(&mut entered).await.is_some() {
                        break;
                    }
                    tokio::task::yield_now().await;
                }
                return;
            }
            let reservation = entered.await.unwrap();
            if busy.fetch_add(1, Ordering::SeqCst) >= 3 {
                over.store(true, Ordering::SeqCst);
            }
            tokio::task::yield_now().await;
            busy.fetch_sub(1, Ordering::SeqCst);
            drop(reservation);
        });
    }
    let all = async { while tasks.join_next().await.is_some_and(|task| task.is_ok()) {} };
    tokio::time::timeout(Duration::from_secs(60), all).await.expect("all requests are served");
    assert!(tasks.is_empty() && !over.load(Ordering::SeqCst));
    assert_eq!(engines.capacity.load(Ordering::SeqCst), 3);
    assert_eq!(engines.queue.waiting.load(Ordering::SeqCst), 0);
    assert!(engines.queue.lock().notifiers.is_empty() && engines.queue.lock().queue.len() == 0);
    assert_eq!(engines.notify.waiting(), 0);
}

#[tokio::test]
async fn a_woken_request_that_leaves_wakes_the_next() {
    let engines = TestEngines::new(1);
    let reservation = engines.enter(ticket(1)).await.unwrap();
    let mut first = Box::pin(engines.enter(ticket(1)));
    let mut second = Box::pin(engines.enter(ticket(1)));
    assert!(futures_poll(&mut first).await.is_none() && futures_poll(&mut second).await.is_none());
    drop(reservation);
    // The first request has been woken and is never polled again.
    drop(first);
    let waited = tokio::time::timeout(Duration::from_secs(30), second).await;
    assert!(waited.expect("it is woken").is_ok());
}

#[tokio::test]
async fn a_deadline_ends_the_wait_with_429_and_retry_after() {
    let engines = TestEngines::new(0);
    let soon = AdmissionRequest { deadline: Instant::now() + Duration::from_millis(30), ..ticket(1) };
    let refused = engines.enter(soon).await.err().expect("expired");
    assert_eq!((refused.status, refused.code.as_deref()), (429, Some("queue_timeout")));
    assert!(refused.retry_after.is_some());
    let past = AdmissionRequest { deadline: Instant::now(), ..ticket(1) };
    assert_eq!(engines.enter(past).await.err().map(|e| e.status), Some(429));
    assert_eq!(engines.queue.waiting.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_deadline_that_cannot_be_met_is_refused_at_once() {
    let engines = TestEngines::new(0);
    let begun = Instant::now();
    (0..20).for_each(|n| engines.queue.lock().drain.served(begun + Duration::from_secs(n)));
    let mut first = Box::pin(engines.enter(ticket(1)));
    assert!(futures_poll(&mut first).await.is_none());
    let hurried = AdmissionRequest { deadline: Instant::now() + Duration::from_millis(1500), ..ticket(1) };
    let refused = engines.enter(hurried).await.err().expect("one ahead takes a second, and then it");
    assert_eq!(refused.code.as_deref(), Some("overloaded"));
    let mut patient = Box::pin(engines.enter(ticket(1)));
    assert!(futures_poll(&mut patient).await.is_none(), "it waits");
}

#[tokio::test]
async fn without_any_engine_it_is_503_at_once() {
    let engines = TestEngines::new(0);
    let refused = engines
        .queue
        .enter(ticket(1), WaitOptions::default(), &terms(), || Err::<(), _>(Unavailable::NoEngine))
        .await;
    let refused = refused.expect_err("there is none");
    assert_eq!((refused.error.status, refused.cause), (503, Unavailable::NoEngine));
}

#[tokio::test]
async fn waiting_requests_fail_when_the_last_engine_is_removed() {
    let (engines, terms) = (TestEngines::new(0), QueueConfig { requests: 2, ..terms() });
    let gone = AtomicBool::new(false);
    let there = || if gone.load(Ordering::SeqCst) { Unavailable::NoEngine } else { Unavailable::Full };
    let enter = |millis| {
        let ticket =
            AdmissionRequest { deadline: Instant::now() + Duration::from_millis(millis), ..ticket(1) };
        Box::pin(engines.queue.enter(ticket, WaitOptions::default(), &terms, || Err::<(), _>(there())))
    };
    let mut waiting = [enter(100), enter(60_000)];
    for wait in &mut waiting {
        assert!(futures_poll(wait).await.is_none());
    }
    let is_no_engine = |refused: Result<(), AdmissionError>| {
        let refused = refused.expect_err("there is none");
        assert_eq!((refused.error.status, refused.cause), (503, Unavailable::NoEngine));
    };
    gone.store(true, Ordering::SeqCst);
    let [first, second] = waiting;
    is_no_engine(first.await);
    // No request behind them has tried, and a request that finds the queue full has not either.
    let behind = enter(60_000);
    tokio::pin!(behind);
    assert!(futures_poll(&mut behind).await.is_none());
    is_no_engine(enter(60_000).await);
    drop(second);
}

#[tokio::test]
async fn a_full_queue_refuses_by_tenant_and_in_total() {
    let engines = TestEngines::new(0);
    let terms = QueueConfig { requests: 3, tenant_requests: 2, ..terms() };
    let enter = |tenant| {
        Box::pin(engines.queue.enter(ticket(tenant), WaitOptions::default(), &terms, engines.reserve()))
    };
    let mut waiting = [enter(1), enter(1), enter(2)];
    for wait in &mut waiting[..2] {
        assert!(futures_poll(wait).await.is_none());
    }
    let message = |refused: Result<TestReservation, AdmissionError>| {
        let refused = refused.err().expect("refused");
        assert_eq!(refused.cause, Unavailable::Full);
        refused.error.message
    };
    assert!(message(enter(1).await).contains("your requests"));
    assert!(futures_poll(&mut waiting[2]).await.is_none());
    assert!(message(enter(3).await).contains("too many requests"));
}

/// One idle engine, number 1, and a full one. A request may have been failed by the first.
struct EnginePair {
    idle: TestEngines,
    full: TestEngines,
}

impl EnginePair {
    fn new() -> Self {
        let idle = TestEngines::new(100);
        let mut full = TestEngines::new(0);
        // Both belong to one model.
        (full.notify, full.queue) = (Arc::clone(&idle.notify), Arc::clone(&idle.queue));
        Self { idle, full }
    }

    async fn enter(
        &self,
        ticket: AdmissionRequest,
        options: WaitOptions,
    ) -> Result<TestReservation, AdmissionError> {
        let (mut idle, mut full) = (self.idle.reserve(), self.full.reserve());
        let is_retry = options.excluded == [1];
        let reserve = move || if is_retry { full() } else { idle().or_else(|_| full()) };
        self.idle.queue.enter(ticket, options, &terms(), reserve).await
    }
}

fn retry(ahead: bool) -> WaitOptions {
    WaitOptions { excluded: vec![1], ahead }
}

#[tokio::test]
async fn a_retry_that_waits_for_a_busy_engine_holds_up_no_request_that_can_be_served() {
    for ahead in [true, false] {
        let pair = EnginePair::new();
        let mut waits = Box::pin(pair.enter(ticket(1), retry(ahead)));
        assert!(futures_poll(&mut waits).await.is_none());
        let mut reservations = Vec::new();
        for n in 0..20 {
            let later = async {
                // The retry tries again whenever it is the first one.
                tokio::select! {
                    _ = &mut waits => panic!("its engine is full"),
                    reservation = pair.enter(ticket(n % 3), WaitOptions::default()) => reservation,
                }
            };
            let reservation = tokio::time::timeout(Duration::from_secs(30), later).await;
            reservations.push(reservation.expect("an engine is idle").unwrap());
        }
        pair.full.capacity.fetch_add(1, Ordering::SeqCst);
        pair.full.notify.notify();
        let reservation = tokio::time::timeout(Duration::from_secs(30), waits).await.expect("it is woken");
        assert!(reservation.is_ok());
        drop(reservations);
        assert_eq!(pair.idle.queue.waiting.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test]
async fn requests_behind_a_retry_are_woken_when_their_engine_has_capacity() {
    let pair = EnginePair::new();
    pair.idle.capacity.store(0, Ordering::SeqCst);
    let mut waits = Box::pin(pair.enter(ticket(1), retry(true)));
    let mut behind: Vec<_> =
        (0..5).map(|n| Box::pin(pair.enter(ticket(n), WaitOptions::default()))).collect();
    assert!(futures_poll(&mut waits).await.is_none());
    for wait in &mut behind {
        assert!(futures_poll(wait).await.is_none());
    }
    pair.idle.capacity.store(5, Ordering::SeqCst);
    pair.idle.notify.notify();
    let served = async {
        // The first request must try before those behind are woken, so it runs beside them.
        tokio::select! {
            _ = &mut waits => panic!("its engine is full"),
            reservations = futures::future::join_all(behind) => reservations,
        }
    };
    let reservations = tokio::time::timeout(Duration::from_secs(30), served).await.expect("they are woken");
    assert!(reservations.iter().all(Result::is_ok));
}

#[tokio::test]
async fn a_retry_with_a_finished_prefill_gets_the_next_capacity_first() {
    let engines = TestEngines::new(0);
    let terms = terms();
    let enter = |options| Box::pin(engines.queue.enter(ticket(1), options, &terms, engines.reserve()));
    let (mut early, mut again) = (enter(WaitOptions::default()), enter(retry(true)));
    assert!(futures_poll(&mut early).await.is_none() && futures_poll(&mut again).await.is_none());
    engines.capacity.fetch_add(1, Ordering::SeqCst);
    engines.notify.notify();
    assert!(futures_poll(&mut early).await.is_none(), "it is not its turn");
    let reservation =
        tokio::time::timeout(Duration::from_secs(30), again).await.expect("it is woken").unwrap();
    drop(reservation);
    assert!(tokio::time::timeout(Duration::from_secs(30), early).await.expect("and then it").is_ok());
}

#[tokio::test]
async fn a_queue_that_hardly_moves_refuses_no_request_for_which_an_engine_is_idle() {
    let pair = EnginePair::new();
    let begun = Instant::now();
    (0..20).for_each(|n| pair.idle.queue.lock().drain.served(begun + Duration::from_secs(10 * n)));
    let mut waits = Box::pin(pair.enter(ticket(1), retry(true)));
    assert!(futures_poll(&mut waits).await.is_none());
    let hurried = AdmissionRequest { deadline: Instant::now() + Duration::from_secs(5), ..ticket(2) };
    let mut later = Box::pin(pair.enter(hurried, WaitOptions::default()));
    assert!(futures_poll(&mut later).await.expect("at once").is_ok());
}

#[tokio::test]
async fn engines_that_become_free_all_the_time_keep_no_request_from_an_engine_that_is_idle() {
    let pair = EnginePair::new();
    pair.idle.capacity.store(0, Ordering::SeqCst);
    let mut first = Box::pin(pair.enter(ticket(1), retry(true)));
    let mut behind = Box::pin(pair.enter(ticket(2), WaitOptions::default()));
    assert!(futures_poll(&mut first).await.is_none());
    assert!(futures_poll(&mut behind).await.is_none());
    pair.idle.capacity.store(1, Ordering::SeqCst);
    // Before each of them tries in turn, another engine of the fleet becomes free.
    for _ in 0..4 {
        pair.full.notify.notify();
        assert!(futures_poll(&mut first).await.is_none(), "its engine is full");
        pair.full.notify.notify();
        if let Some(reservation) = futures_poll(&mut behind).await {
            assert!(reservation.is_ok());
            return;
        }
    }
    panic!("the request behind never had its try");
}

#[tokio::test]
async fn a_wait_that_ends_without_an_engine_is_no_dispatch() {
    /// A retry that proceeds without an engine.
    struct NoEngineReservation;
    impl Reservation for NoEngineReservation {
        fn has_engine(&self) -> bool {
            false
        }
    }
    let engines = TestEngines::new(0);
    let terms = terms();
    let mut tries = 0;
    let reserve = || {
        tries += 1;
        if tries > 2 { Ok(NoEngineReservation) } else { Err(Unavailable::Full) }
    };
    let found = engines.queue.enter(ticket(1), retry(false), &terms, reserve).await;
    assert!(found.is_ok());
    let ended =
        [QueueOutcome::NoCapacity, QueueOutcome::Dispatched].map(|outcome| engines.metrics.ended(outcome));
    assert_eq!(ended, [1, 0]);
}

#[tokio::test]
async fn an_overtaken_round_does_not_end_the_newer_round() {
    let pair = EnginePair::new();
    pair.idle.capacity.store(0, Ordering::SeqCst);
    let mut first = Box::pin(pair.enter(ticket(1), retry(true)));
    assert!(futures_poll(&mut first).await.is_none());
    // While the request behind it tries, the first one's engine becomes free.
    let (notify, capacity) = (Arc::clone(&pair.full.notify), Arc::clone(&pair.full.capacity));
    let overtaken = || {
        capacity.store(1, Ordering::SeqCst);
        notify.notify();
        Err::<TestReservation, _>(Unavailable::Full)
    };
    let terms = terms();
    let mut behind = Box::pin(pair.idle.queue.enter(ticket(2), WaitOptions::default(), &terms, overtaken));
    assert!(futures_poll(&mut behind).await.is_none());
    let (called, next) = {
        let inner = pair.idle.queue.lock();
        (inner.current_try, inner.queue.next())
    };
    assert!(called.is_some() && called == next, "the first one is called, and stays so");
    assert!(futures_poll(&mut first).await.expect("at once").is_ok());
}
