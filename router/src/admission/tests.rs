//! The queue's shell: nobody who waits is forgotten, and nobody who left is in the way.

use std::sync::atomic::AtomicBool;

use super::*;
use crate::auth::TenantId;

struct Engines {
    metrics: Arc<AdmissionMetrics>,
    room: Arc<AtomicUsize>,
    freed: Arc<Freed>,
    queue: Arc<ModelQueue>,
}

/// A place at an engine; dropping it makes room.
struct Seat(Arc<AtomicUsize>, Arc<Freed>);

impl Found for Seat {}
impl Found for () {}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        self.1.ring();
    }
}

impl Engines {
    fn new(room: usize) -> Self {
        let freed = Arc::<Freed>::default();
        let metrics = Arc::new(AdmissionMetrics::new(&crate::metrics::Registry::default()));
        let admission = Admission::new(Arc::clone(&freed), Arc::clone(&metrics));
        Self {
            metrics,
            room: Arc::new(AtomicUsize::new(room)),
            freed,
            queue: admission.queue("m", Leg::Decode),
        }
    }

    fn reserve(&self) -> impl FnMut() -> Result<Seat, Scarce> + Send + 'static {
        let (room, freed) = (Arc::clone(&self.room), Arc::clone(&self.freed));
        move || {
            let taken = room.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |free| free.checked_sub(1));
            taken.map(|_| Seat(Arc::clone(&room), Arc::clone(&freed))).map_err(|_| Scarce::Full)
        }
    }

    async fn enter(&self, ticket: Ticket) -> Result<Seat, ApiError> {
        self.queue.enter(ticket, Wants::default(), &terms(), self.reserve()).await.map_err(|refused| {
            assert_eq!(refused.scarce, Scarce::Full);
            refused.error
        })
    }
}

fn terms() -> QueueConfig {
    QueueConfig { requests: 2000, tenant_requests: 1000, ..QueueConfig::default() }
}

fn ticket(tenant: u32) -> Ticket {
    let claim =
        Claim { tenant: Some(TenantId(tenant)), weight: 1, priority: Priority::Normal, bytes: 1, cost: 1 };
    Ticket { claim, deadline: Instant::now() + Duration::from_secs(60), ends: None }
}

#[tokio::test]
async fn with_room_nobody_queues() {
    let engines = Engines::new(2);
    let seats = (engines.enter(ticket(1)).await.unwrap(), engines.enter(ticket(1)).await.unwrap());
    assert_eq!(engines.queue.waiting.load(Ordering::SeqCst), 0);
    drop(seats);
}

#[tokio::test]
async fn whoever_waits_gets_the_room_that_another_leaves() {
    let engines = Engines::new(1);
    let seat = engines.enter(ticket(1)).await.unwrap();
    let mut second = Box::pin(engines.enter(ticket(1)));
    assert!(futures_poll(&mut second).await.is_none());
    drop(seat);
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
async fn nobody_is_forgotten_when_hundreds_come_wait_cancel_and_go() {
    let engines = Arc::new(Engines::new(3));
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
            let seat = entered.await.unwrap();
            if busy.fetch_add(1, Ordering::SeqCst) >= 3 {
                over.store(true, Ordering::SeqCst);
            }
            tokio::task::yield_now().await;
            busy.fetch_sub(1, Ordering::SeqCst);
            drop(seat);
        });
    }
    let all = async { while tasks.join_next().await.is_some_and(|task| task.is_ok()) {} };
    tokio::time::timeout(Duration::from_secs(60), all).await.expect("everybody is served");
    assert!(tasks.is_empty() && !over.load(Ordering::SeqCst));
    assert_eq!(engines.room.load(Ordering::SeqCst), 3);
    assert_eq!(engines.queue.waiting.load(Ordering::SeqCst), 0);
    assert!(engines.queue.lock().bells.is_empty() && engines.queue.lock().queue.len() == 0);
    assert_eq!(engines.freed.waiting(), 0);
}

#[tokio::test]
async fn one_who_was_woken_and_leaves_wakes_the_next() {
    let engines = Engines::new(1);
    let seat = engines.enter(ticket(1)).await.unwrap();
    let mut first = Box::pin(engines.enter(ticket(1)));
    let mut second = Box::pin(engines.enter(ticket(1)));
    assert!(futures_poll(&mut first).await.is_none() && futures_poll(&mut second).await.is_none());
    drop(seat);
    // The first has been woken and is never polled again.
    drop(first);
    let waited = tokio::time::timeout(Duration::from_secs(30), second).await;
    assert!(waited.expect("it is woken").is_ok());
}

#[tokio::test]
async fn a_deadline_ends_the_wait_with_429_and_a_time_to_come_back() {
    let engines = Engines::new(0);
    let soon = Ticket { deadline: Instant::now() + Duration::from_millis(30), ..ticket(1) };
    let refused = engines.enter(soon).await.err().expect("expired");
    assert_eq!((refused.status, refused.code.as_deref()), (429, Some("queue_timeout")));
    assert!(refused.retry_after.is_some());
    let past = Ticket { deadline: Instant::now(), ..ticket(1) };
    assert_eq!(engines.enter(past).await.err().map(|e| e.status), Some(429));
    assert_eq!(engines.queue.waiting.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_deadline_that_cannot_be_met_is_refused_at_once() {
    let engines = Engines::new(0);
    let begun = Instant::now();
    (0..20).for_each(|n| engines.queue.lock().drain.served(begun + Duration::from_secs(n), true));
    let mut first = Box::pin(engines.enter(ticket(1)));
    assert!(futures_poll(&mut first).await.is_none());
    let hurried = Ticket { deadline: Instant::now() + Duration::from_millis(1500), ..ticket(1) };
    let refused = engines.enter(hurried).await.err().expect("one ahead takes a second, and then it");
    assert_eq!(refused.code.as_deref(), Some("overloaded"));
    let mut patient = Box::pin(engines.enter(ticket(1)));
    assert!(futures_poll(&mut patient).await.is_none(), "it waits");
}

#[tokio::test]
async fn without_any_engine_it_is_503_at_once() {
    let engines = Engines::new(0);
    let refused =
        engines.queue.enter(ticket(1), Wants::default(), &terms(), || Err::<(), _>(Scarce::NoEngine)).await;
    let refused = refused.expect_err("there is none");
    assert_eq!((refused.error.status, refused.scarce), (503, Scarce::NoEngine));
}

#[tokio::test]
async fn whoever_waits_when_the_last_engine_goes_is_told_that_there_is_none() {
    let (engines, terms) = (Engines::new(0), QueueConfig { requests: 2, ..terms() });
    let gone = AtomicBool::new(false);
    let there = || if gone.load(Ordering::SeqCst) { Scarce::NoEngine } else { Scarce::Full };
    let enter = |millis| {
        let ticket = Ticket { deadline: Instant::now() + Duration::from_millis(millis), ..ticket(1) };
        Box::pin(engines.queue.enter(ticket, Wants::default(), &terms, || Err::<(), _>(there())))
    };
    let mut waiting = [enter(100), enter(60_000)];
    for wait in &mut waiting {
        assert!(futures_poll(wait).await.is_none());
    }
    let is_told = |refused: Result<(), NotLetIn>| {
        let refused = refused.expect_err("there is none");
        assert_eq!((refused.error.status, refused.scarce), (503, Scarce::NoEngine));
    };
    gone.store(true, Ordering::SeqCst);
    let [first, second] = waiting;
    is_told(first.await);
    // Of those behind nobody has tried; who finds the queue full has not either.
    let behind = enter(60_000);
    tokio::pin!(behind);
    assert!(futures_poll(&mut behind).await.is_none());
    is_told(enter(60_000).await);
    drop(second);
}

#[tokio::test]
async fn a_full_queue_refuses_by_tenant_and_in_total() {
    let engines = Engines::new(0);
    let terms = QueueConfig { requests: 3, tenant_requests: 2, ..terms() };
    let enter =
        |tenant| Box::pin(engines.queue.enter(ticket(tenant), Wants::default(), &terms, engines.reserve()));
    let mut waiting = [enter(1), enter(1), enter(2)];
    for wait in &mut waiting[..2] {
        assert!(futures_poll(wait).await.is_none());
    }
    let message = |refused: Result<Seat, NotLetIn>| {
        let refused = refused.err().expect("refused");
        assert_eq!(refused.scarce, Scarce::Full);
        refused.error.message
    };
    assert!(message(enter(1).await).contains("your requests"));
    assert!(futures_poll(&mut waiting[2]).await.is_none());
    assert!(message(enter(3).await).contains("too many requests"));
}

/// One engine, number 1, that is idle, and one that is full; a request may have been failed by the first.
struct Pair {
    idle: Engines,
    full: Engines,
}

impl Pair {
    fn new() -> Self {
        let idle = Engines::new(100);
        let mut full = Engines::new(0);
        // Both belong to one model.
        (full.freed, full.queue) = (Arc::clone(&idle.freed), Arc::clone(&idle.queue));
        Self { idle, full }
    }

    async fn enter(&self, ticket: Ticket, wants: Wants) -> Result<Seat, NotLetIn> {
        let (mut idle, mut full) = (self.idle.reserve(), self.full.reserve());
        let is_retry = wants.without == [1];
        let reserve = move || if is_retry { full() } else { idle().or_else(|_| full()) };
        self.idle.queue.enter(ticket, wants, &terms(), reserve).await
    }
}

fn retry(ahead: bool) -> Wants {
    Wants { without: vec![1], ahead }
}

#[tokio::test]
async fn a_retry_that_waits_for_a_busy_engine_holds_up_no_request_that_can_be_served() {
    for ahead in [true, false] {
        let pair = Pair::new();
        let mut waits = Box::pin(pair.enter(ticket(1), retry(ahead)));
        assert!(futures_poll(&mut waits).await.is_none());
        let mut seats = Vec::new();
        for n in 0..20 {
            let later = async {
                // The retry looks again whenever it is the first one.
                tokio::select! {
                    _ = &mut waits => panic!("its engine is full"),
                    seat = pair.enter(ticket(n % 3), Wants::default()) => seat,
                }
            };
            let seat = tokio::time::timeout(Duration::from_secs(30), later).await;
            seats.push(seat.expect("an engine is idle").unwrap());
        }
        pair.full.room.fetch_add(1, Ordering::SeqCst);
        pair.full.freed.ring();
        let seat = tokio::time::timeout(Duration::from_secs(30), waits).await.expect("it is woken");
        assert!(seat.is_ok());
        drop(seats);
        assert_eq!(pair.idle.queue.waiting.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test]
async fn those_behind_a_retry_are_woken_when_their_engine_has_room_again() {
    let pair = Pair::new();
    pair.idle.room.store(0, Ordering::SeqCst);
    let mut waits = Box::pin(pair.enter(ticket(1), retry(true)));
    let mut behind: Vec<_> = (0..5).map(|n| Box::pin(pair.enter(ticket(n), Wants::default()))).collect();
    assert!(futures_poll(&mut waits).await.is_none());
    for wait in &mut behind {
        assert!(futures_poll(wait).await.is_none());
    }
    pair.idle.room.store(5, Ordering::SeqCst);
    pair.idle.freed.ring();
    let served = async {
        // The first one must look, or they are not told: it runs beside them.
        tokio::select! {
            _ = &mut waits => panic!("its engine is full"),
            seats = futures::future::join_all(behind) => seats,
        }
    };
    let seats = tokio::time::timeout(Duration::from_secs(30), served).await.expect("they are woken");
    assert!(seats.iter().all(Result::is_ok));
}

#[tokio::test]
async fn a_retry_that_holds_a_prefill_gets_the_next_room_before_those_who_came_earlier() {
    let engines = Engines::new(0);
    let terms = terms();
    let enter = |wants| Box::pin(engines.queue.enter(ticket(1), wants, &terms, engines.reserve()));
    let (mut early, mut again) = (enter(Wants::default()), enter(retry(true)));
    assert!(futures_poll(&mut early).await.is_none() && futures_poll(&mut again).await.is_none());
    engines.room.fetch_add(1, Ordering::SeqCst);
    engines.freed.ring();
    assert!(futures_poll(&mut early).await.is_none(), "it is not its turn");
    let seat = tokio::time::timeout(Duration::from_secs(30), again).await.expect("it is woken").unwrap();
    drop(seat);
    assert!(tokio::time::timeout(Duration::from_secs(30), early).await.expect("and then it").is_ok());
}

#[tokio::test]
async fn a_queue_that_hardly_moves_refuses_no_request_for_which_an_engine_is_idle() {
    let pair = Pair::new();
    let begun = Instant::now();
    (0..20).for_each(|n| pair.idle.queue.lock().drain.served(begun + Duration::from_secs(10 * n), true));
    let mut waits = Box::pin(pair.enter(ticket(1), retry(true)));
    assert!(futures_poll(&mut waits).await.is_none());
    let hurried = Ticket { deadline: Instant::now() + Duration::from_secs(5), ..ticket(2) };
    let mut later = Box::pin(pair.enter(hurried, Wants::default()));
    assert!(futures_poll(&mut later).await.expect("at once").is_ok());
}

#[tokio::test]
async fn engines_that_become_free_all_the_time_keep_no_request_from_an_engine_that_is_idle() {
    let pair = Pair::new();
    pair.idle.room.store(0, Ordering::SeqCst);
    let mut first = Box::pin(pair.enter(ticket(1), retry(true)));
    let mut behind = Box::pin(pair.enter(ticket(2), Wants::default()));
    assert!(futures_poll(&mut first).await.is_none());
    assert!(futures_poll(&mut behind).await.is_none());
    pair.idle.room.store(1, Ordering::SeqCst);
    // Each of them looks in turn, and before it does, another engine of the fleet becomes free.
    for _ in 0..4 {
        pair.full.freed.ring();
        assert!(futures_poll(&mut first).await.is_none(), "its engine is full");
        pair.full.freed.ring();
        if let Some(seat) = futures_poll(&mut behind).await {
            assert!(seat.is_ok());
            return;
        }
    }
    panic!("the request behind never had its try");
}

#[tokio::test]
async fn a_wait_that_ends_without_an_engine_is_no_dispatch() {
    /// A retry that goes on without an engine.
    struct Without;
    impl Found for Without {
        fn has_engine(&self) -> bool {
            false
        }
    }
    let engines = Engines::new(0);
    let terms = terms();
    let mut tries = 0;
    let reserve = || {
        tries += 1;
        if tries > 2 { Ok(Without) } else { Err(Scarce::Full) }
    };
    let found = engines.queue.enter(ticket(1), retry(false), &terms, reserve).await;
    assert!(found.is_ok());
    let ended = [Outcome::NoCapacity, Outcome::Dispatched].map(|outcome| engines.metrics.ended(outcome));
    assert_eq!(ended, [1, 0]);
}

#[tokio::test]
async fn a_try_that_another_round_overtakes_ends_nothing_of_that_round() {
    let pair = Pair::new();
    pair.idle.room.store(0, Ordering::SeqCst);
    let mut first = Box::pin(pair.enter(ticket(1), retry(true)));
    assert!(futures_poll(&mut first).await.is_none());
    // While the one behind it tries, the first one's engine becomes free.
    let (freed, room) = (Arc::clone(&pair.full.freed), Arc::clone(&pair.full.room));
    let overtaken = || {
        room.store(1, Ordering::SeqCst);
        freed.ring();
        Err::<Seat, _>(Scarce::Full)
    };
    let terms = terms();
    let mut behind = Box::pin(pair.idle.queue.enter(ticket(2), Wants::default(), &terms, overtaken));
    assert!(futures_poll(&mut behind).await.is_none());
    let (called, next) = {
        let inner = pair.idle.queue.lock();
        (inner.called, inner.queue.next())
    };
    assert!(called.is_some() && called == next, "the first one is called, and stays so");
    assert!(futures_poll(&mut first).await.expect("at once").is_ok());
}
