//! The threads that compile grammars and compute masks.
//!
//! | thread | does |
//! |---|---|
//! | `grammar-compile-n` | compiles constraints, in order of arrival; its stack is large enough for the deepest schema |
//! | `grammar-mask-n` | computes the masks of running sequences, in the order of the tokens |
//!
//! They start with the first constraint, and end by themselves when the service and all states are dropped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use baton_openai::OutputConstraint;
use llguidance::ParserFactory;
use tokio::sync::oneshot;

use super::cache::{self, GrammarCache};
use super::cancel::{CancelOnDrop, CompileControl};
use super::compile::{CompiledGrammar, compile, factory};
use super::state::{GrammarCursor, GrammarState, MaskOrder, StatePermit};
use super::vocabulary::token_trie;
use super::{COMPILE_QUEUE_MAX, COMPILE_TIMEOUT, GrammarRefusal, STATES_MAX};
use crate::model::tokenizer::Tokenizer;

/// Threads that compile: one slow constraint does not delay the others.
const COMPILE_THREADS: usize = 2;
/// Stack of a compiling thread: 32 KiB for each of the 2,048 levels that a schema may have with its references.
const COMPILE_STACK_BYTES: usize = 64 << 20;
/// Stack of a thread for masks.
const MASK_STACK_BYTES: usize = 8 << 20;
/// Threads for masks, by cores: the step loop computes on all of them, so most are its own.
const CORES_PER_MASK_THREAD: usize = 4;
/// Limit of the threads for masks.
const MASK_THREADS_MAX: usize = 4;

/// What a service knows of the model.
#[derive(Clone)]
struct GrammarVocabulary {
    tokenizer: Arc<Tokenizer>,
    rows: usize,
    eos: Vec<u32>,
}

/// Grammars over one model's vocabulary.
pub struct GrammarService {
    vocabulary: GrammarVocabulary,
    orders: OnceLock<Option<SyncSender<CompileOrder>>>,
    live: Arc<AtomicUsize>,
}

/// A constraint to compile, for so many sequences as there are permits.
struct CompileOrder {
    constraint: OutputConstraint,
    stops: Arc<[u32]>,
    text: Vec<u32>,
    permits: Vec<StatePermit>,
    control: Arc<CompileControl>,
    reply: oneshot::Sender<CompileReply>,
}

/// The answer to an order.
pub(super) type CompileReply = Result<Vec<GrammarState>, GrammarRefusal>;

impl GrammarService {
    /// A service without threads, for the tokens of a model with `rows` rows and these end-of-text tokens.
    #[must_use]
    pub fn new(tokenizer: &Arc<Tokenizer>, rows: usize, eos: &[u32]) -> Self {
        let vocabulary = GrammarVocabulary { tokenizer: Arc::clone(tokenizer), rows, eos: eos.to_vec() };
        Self { vocabulary, orders: OnceLock::new(), live: Arc::default() }
    }

    /// The states of `count` sequences before their first token, which continues `text`. `stops` are the tokens that
    /// end them.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the compilation.
    ///
    /// # Errors
    /// [`GrammarRefusal`].
    pub async fn states(
        &self,
        constraint: &OutputConstraint,
        stops: &[u32],
        text: Vec<u32>,
        count: usize,
    ) -> Result<Vec<GrammarState>, GrammarRefusal> {
        let permits = StatePermit::take(&self.live, count)
            .ok_or(GrammarRefusal::Busy("too many sequences with structured output"))?;
        let orders = self.orders.get_or_init(|| start(self.vocabulary.clone()));
        let orders = orders.as_ref().ok_or(GrammarRefusal::Busy("no thread for structured output"))?;
        let (reply, answer) = oneshot::channel();
        let (constraint, stops) = (constraint.clone(), stops.into());
        let waiting = CancelOnDrop(Arc::default());
        let order = CompileOrder { constraint, stops, text, permits, control: Arc::clone(&waiting.0), reply };
        if orders.try_send(order).is_err() {
            return Err(GrammarRefusal::Busy("too many constraints are waiting to be compiled"));
        }
        answered(answer, &waiting.0, COMPILE_TIMEOUT).await
    }
}

/// Waits for the answer to an order: so long in the queue, and as long again from the begin of its compilation on. The
/// constraint is at fault only if its own compilation takes the time.
pub(super) async fn answered(
    mut answer: oneshot::Receiver<CompileReply>,
    control: &CompileControl,
    at_most: Duration,
) -> CompileReply {
    let mut found = tokio::time::timeout(at_most, &mut answer).await;
    let begun = control.begun();
    if let (Err(_), Some(begun)) = (&found, begun) {
        found = tokio::time::timeout_at((begun + at_most).into(), answer).await;
    }
    match found {
        Ok(Ok(states)) => states,
        // The compiler panicked, and dropped the order.
        Ok(Err(_)) => Err(GrammarRefusal::Invalid("it cannot be compiled".into())),
        Err(_) if begun.is_some() => Err(GrammarRefusal::TooSlow),
        Err(_) => Err(GrammarRefusal::Busy("the constraints before it take too long to compile")),
    }
}

/// Starts the threads; `None` if the system has none.
fn start(vocabulary: GrammarVocabulary) -> Option<SyncSender<CompileOrder>> {
    // A state has at most one order, and its permit ends with it.
    let (masks, wanted) = sync_channel::<MaskOrder>(STATES_MAX);
    let wanted = Arc::new(Mutex::new(wanted));
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let rows = vocabulary.rows;
    for index in 0..(cores / CORES_PER_MASK_THREAD).clamp(1, MASK_THREADS_MAX) {
        let wanted = Arc::clone(&wanted);
        let thread = Builder::new().name(format!("grammar-mask-{index}")).stack_size(MASK_STACK_BYTES);
        thread.spawn(move || compute_masks(&wanted, rows)).ok()?;
    }
    let (orders, arriving) = sync_channel(COMPILE_QUEUE_MAX);
    let shared = Arc::new((Mutex::new(arriving), OnceLock::new()));
    for index in 0..COMPILE_THREADS {
        let (shared, vocabulary, masks) = (Arc::clone(&shared), vocabulary.clone(), masks.clone());
        let thread = Builder::new().name(format!("grammar-compile-{index}")).stack_size(COMPILE_STACK_BYTES);
        let work = move || {
            let (arriving, compiler) = &*shared;
            compile_orders(arriving, || compiler.get_or_init(|| Compiler::new(&vocabulary)), &masks);
        };
        thread.spawn(work).ok()?;
    }
    Some(orders)
}

/// Computes masks until no state is left.
fn compute_masks(wanted: &Mutex<Receiver<MaskOrder>>, rows: usize) {
    loop {
        // Only one thread waits for the next order; the others wait for the lock.
        let next = wanted.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(order) = next else { return };
        // A panic drops the order, and its sequence ends with a fault.
        let _ = catch_unwind(AssertUnwindSafe(|| order.carry_out(rows)));
    }
}

/// Compiles constraints until the service is dropped.
fn compile_orders<'a>(
    arriving: &Mutex<Receiver<CompileOrder>>,
    compiler: impl Fn() -> &'a Compiler,
    masks: &SyncSender<MaskOrder>,
) {
    loop {
        // Only one thread waits for the next order; the other one waits for the lock.
        let next = arriving.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(order) = next else { return };
        if order.reply.is_closed() {
            continue;
        }
        order.control.begin(Instant::now());
        let CompileOrder { constraint, stops, text, permits, control, reply } = order;
        let states = || compiler().states(&constraint, (&stops, &text[..]), permits, masks, &control);
        // After a panic the dropped reply is the answer.
        if let Ok(states) = catch_unwind(AssertUnwindSafe(states)) {
            let _ = reply.send(states);
        }
    }
}

/// What the compiling threads share.
struct Compiler {
    factory: Result<ParserFactory, String>,
    rows: usize,
    cache: Mutex<GrammarCache>,
}

impl Compiler {
    fn new(vocabulary: &GrammarVocabulary) -> Self {
        let GrammarVocabulary { tokenizer, rows, eos } = vocabulary;
        let build = || token_trie(tokenizer, *rows, eos).and_then(|trie| factory(&trie));
        let built = catch_unwind(AssertUnwindSafe(build));
        let unusable = || Err("the model's vocabulary cannot be used for structured output".to_owned());
        Self { factory: built.unwrap_or_else(|_| unusable()), rows: *rows, cache: Mutex::default() }
    }

    fn states(
        &self,
        constraint: &OutputConstraint,
        (stops, text): (&Arc<[u32]>, &[u32]),
        permits: Vec<StatePermit>,
        masks: &SyncSender<MaskOrder>,
        control: &CompileControl,
    ) -> CompileReply {
        let mut begun = self.compiled(constraint, control).map_err(GrammarRefusal::Invalid)?;
        begun.advance(text, self.rows, control).map_err(GrammarRefusal::Invalid)?;
        let state = |permit| {
            let CompiledGrammar { matcher, first, .. } = begun.copy();
            let cursor = GrammarCursor { matcher, stops: Arc::clone(stops), _permit: permit };
            GrammarState::new(cursor, first, masks.clone())
        };
        Ok(permits.into_iter().map(state).collect())
    }

    /// The grammar of a constraint, from the cache or compiled. No lock is held while it is compiled.
    fn compiled(
        &self,
        constraint: &OutputConstraint,
        control: &CompileControl,
    ) -> Result<CompiledGrammar, String> {
        let factory = self.factory.as_ref().map_err(String::clone)?;
        let cache = || self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let key = cache::key(constraint);
        if let Some(known) = cache().find(&key) {
            return Ok(known);
        }
        let compiled = compile(factory, self.rows, constraint, control)?;
        let kept = compiled.copy();
        if kept.matcher.is_cancelled() {
            return Err("its request has ended".into());
        }
        cache().add(key, kept);
        Ok(compiled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::fixture;

    fn order(live: &Arc<AtomicUsize>) -> (CompileOrder, oneshot::Receiver<CompileReply>) {
        let (reply, answer) = oneshot::channel();
        let order = CompileOrder {
            constraint: OutputConstraint::Choice(vec!["a".into()]),
            stops: Arc::from(Vec::new()),
            text: Vec::new(),
            permits: StatePermit::take(live, 1).expect("there are few"),
            control: Arc::default(),
            reply,
        };
        (order, answer)
    }

    #[test]
    fn the_time_of_a_compilation_does_not_begin_in_the_queue() {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build().expect("a runtime");
        let (reply, answer) = oneshot::channel();
        let control = CompileControl::default();
        // Its time is not over for a minute, while that of the queue is over at once.
        control.begin(Instant::now() + Duration::from_secs(60));
        let answered = runtime.block_on(async {
            let compiled = async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                reply.send(Ok(Vec::new()))
            };
            tokio::join!(answered(answer, &control, Duration::ZERO), compiled).0
        });
        assert!(answered.is_ok_and(|states| states.is_empty()));
    }

    #[test]
    fn only_a_constraint_whose_own_compilation_is_slow_is_at_fault() {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build().expect("a runtime");
        let overdue = |answer, control: &CompileControl| {
            runtime.block_on(answered(answer, control, Duration::ZERO)).expect_err("there is no answer")
        };
        let live = Arc::default();
        let (waiting, answer) = order(&live);
        assert!(matches!(overdue(answer, &waiting.control), GrammarRefusal::Busy(_)));
        let (taken, mut answer) = order(&live);
        let (skipped, begun) = (Arc::clone(&waiting.control), Arc::clone(&taken.control));
        let (tokenizer, _) = fixture("qwen3");
        let rows = tokenizer.vocab();
        let compiler = Compiler::new(&GrammarVocabulary { tokenizer, rows, eos: Vec::new() });
        let (orders, arriving) = sync_channel(2);
        orders.send(waiting).expect("there is room");
        orders.send(taken).expect("there is room");
        drop(orders);
        let (masks, _wanted) = sync_channel(1);
        let compiling = || {
            let (_held, unanswered) = oneshot::channel();
            assert_eq!(overdue(unanswered, &begun), GrammarRefusal::TooSlow);
            &compiler
        };
        compile_orders(&Mutex::new(arriving), compiling, &masks);
        assert!(answer.try_recv().is_ok_and(|states| states.is_ok()), "it was compiled");
        assert!(skipped.begun().is_none(), "a waiter has left");
    }
}
