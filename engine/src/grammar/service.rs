//! The threads that compile grammars and compute masks.
//!
//! | thread | does |
//! |---|---|
//! | `grammar-compile` | compiles constraints, and owns the cache; its stack is large enough for the deepest schema |
//! | `grammar-mask-n` | computes the masks of running sequences, in the order of the tokens |
//!
//! They start with the first constraint, and end by themselves when the service and all states are dropped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Builder;

use baton_openai::OutputConstraint;
use llguidance::ParserFactory;
use tokio::sync::oneshot;

use super::cache::GrammarCache;
use super::compile::{after, compile, factory};
use super::state::{GrammarCursor, GrammarState, MaskOrder, StatePermit};
use super::vocabulary::token_trie;
use super::{COMPILE_QUEUE_MAX, COMPILE_TIMEOUT, GrammarRefusal, STATES_MAX};
use crate::model::tokenizer::Tokenizer;

/// Stack of the compiling thread: 32 KiB for each of the 2,048 levels that a schema may have with its references.
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
    reply: oneshot::Sender<Result<Vec<GrammarState>, GrammarRefusal>>,
}

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
        let order = CompileOrder { constraint, stops, text, permits, reply };
        if orders.try_send(order).is_err() {
            return Err(GrammarRefusal::Busy("too many constraints are waiting to be compiled"));
        }
        match tokio::time::timeout(COMPILE_TIMEOUT, answer).await {
            Ok(Ok(states)) => states,
            // The compiler panicked, and dropped the order.
            Ok(Err(_)) => Err(GrammarRefusal::Invalid("it cannot be compiled".into())),
            Err(_) => Err(GrammarRefusal::TooSlow),
        }
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
    let thread = Builder::new().name("grammar-compile".into()).stack_size(COMPILE_STACK_BYTES);
    thread.spawn(move || compile_orders(&vocabulary, &masks, &arriving)).ok()?;
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
fn compile_orders(
    vocabulary: &GrammarVocabulary,
    masks: &SyncSender<MaskOrder>,
    arriving: &Receiver<CompileOrder>,
) {
    let mut compiler = None;
    while let Ok(order) = arriving.recv() {
        if order.reply.is_closed() {
            continue;
        }
        let compiler = compiler.get_or_insert_with(|| Compiler::new(vocabulary));
        let CompileOrder { constraint, stops, text, permits, reply } = order;
        let states = || compiler.states(&constraint, &stops, &text, permits, masks);
        // After a panic the dropped reply is the answer.
        if let Ok(states) = catch_unwind(AssertUnwindSafe(states)) {
            let _ = reply.send(states);
        }
    }
}

/// The state of the compiling thread.
struct Compiler {
    factory: Result<ParserFactory, String>,
    rows: usize,
    cache: GrammarCache,
}

impl Compiler {
    fn new(vocabulary: &GrammarVocabulary) -> Self {
        let GrammarVocabulary { tokenizer, rows, eos } = vocabulary;
        let build = || token_trie(tokenizer, *rows, eos).and_then(|trie| factory(&trie));
        let built = catch_unwind(AssertUnwindSafe(build));
        let unusable = || Err("the model's vocabulary cannot be used for structured output".to_owned());
        Self { factory: built.unwrap_or_else(|_| unusable()), rows: *rows, cache: GrammarCache::default() }
    }

    fn states(
        &mut self,
        constraint: &OutputConstraint,
        stops: &Arc<[u32]>,
        text: &[u32],
        permits: Vec<StatePermit>,
        masks: &SyncSender<MaskOrder>,
    ) -> Result<Vec<GrammarState>, GrammarRefusal> {
        let factory = self.factory.as_ref().map_err(|why| GrammarRefusal::Invalid(why.clone()))?;
        let compiled = self.cache.get(constraint, || compile(factory, self.rows, constraint));
        let compiled = compiled.map_err(GrammarRefusal::Invalid)?;
        let state = |permit| -> Result<GrammarState, GrammarRefusal> {
            // A lexer of its own: a shared one would fill with the states of others.
            let mut matcher = compiled.matcher.deep_clone();
            let first = match text {
                [] => compiled.first.clone(),
                text => after(&mut matcher, text, self.rows).map_err(GrammarRefusal::Invalid)?,
            };
            let cursor = GrammarCursor { matcher, stops: Arc::clone(stops), _permit: permit };
            Ok(GrammarState::new(cursor, first, masks.clone()))
        };
        permits.into_iter().map(state).collect()
    }
}
