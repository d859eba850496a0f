//! The state table: every state of one kind of actor that was reached, each by the real machine.
//!
//! The machines are not `Clone`, because they stand for blocks that are freed once. An actor is therefore never copied.
//! A plain value, the view, identifies its state. To apply an event to a state, the table creates a new actor and
//! replays the shortest history that led there. The result is stored, so each event is applied to each state once, in
//! however many states of the whole system it occurs.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::rc::Rc;

use crate::bounds::Bounds;
use crate::explore::Mixed;
use crate::names::Renaming;

/// One kind of actor: the model's code around machines of the product.
pub(crate) trait Actor {
    type Input: Copy + Eq + Hash + Debug;
    type Output: Copy + Debug;
    /// Everything on which the actor's future depends.
    type View: Clone + Eq + Hash + Debug;

    fn born(bounds: &Bounds) -> Self;

    /// Applies one event. An error describes what it broke.
    fn live(&mut self, input: Self::Input, outputs: &mut Vec<Self::Output>) -> Result<(), String>;

    fn view(&self) -> Self::View;

    fn renamed(input: Self::Input, by: Renaming) -> Self::Input;
}

/// A state of an actor, by the order in which it was reached. 0 is the initial state.
pub(crate) type StateId = u32;

/// The result of one event: the new state and the actor's outputs.
type Outcome<P> = Result<(StateId, Rc<[<P as Actor>::Output]>), String>;

/// The table of the module's documentation.
pub(crate) struct StateTable<P: Actor> {
    bounds: Bounds,
    views: Vec<P::View>,
    ids: HashMap<P::View, StateId, Mixed>,
    /// For each state but the first: the previous state and the event.
    history: Vec<(StateId, P::Input)>,
    outcomes: HashMap<(StateId, P::Input), Outcome<P>, Mixed>,
    renamed: Vec<[Option<StateId>; 8]>,
}

impl<P: Actor> StateTable<P> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        let view = P::born(&bounds).view();
        Self {
            bounds,
            views: vec![view.clone()],
            ids: HashMap::from_iter([(view, 0)]),
            history: Vec::new(),
            outcomes: HashMap::default(),
            renamed: vec![[Some(0); 8]],
        }
    }

    pub(crate) fn view(&self, id: StateId) -> &P::View {
        &self.views[id as usize]
    }

    /// The number of states that were reached.
    pub(crate) fn len(&self) -> usize {
        self.views.len()
    }

    /// The result of an event in a state.
    pub(crate) fn apply(&mut self, id: StateId, input: P::Input) -> Outcome<P> {
        if let Some(known) = self.outcomes.get(&(id, input)) {
            return known.clone();
        }
        let mut actor = self.reborn(id);
        let mut outputs = Vec::new();
        let outcome = actor.live(input, &mut outputs).map(|()| {
            let view = actor.view();
            (self.enter(view, id, input), Rc::from(outputs))
        });
        self.outcomes.insert((id, input), outcome.clone());
        outcome
    }

    /// The state with all names changed.
    pub(crate) fn renamed(&mut self, id: StateId, by: Renaming) -> StateId {
        if let Some(known) = self.renamed[id as usize][usize::from(by.0)] {
            return known;
        }
        let (parent, input) = self.history[id as usize - 1];
        let parent = self.renamed(parent, by);
        let (other, _) = self.apply(parent, P::renamed(input, by)).expect("a renamed history is as good");
        self.renamed[id as usize][usize::from(by.0)] = Some(other);
        // Every renaming is its own inverse.
        let back = self.renamed(other, by);
        assert_eq!(back, id, "a state that does not rename back: {:?}", self.view(id));
        other
    }

    fn reborn(&self, id: StateId) -> P {
        let mut inputs = Vec::new();
        let mut at = id;
        while at != 0 {
            let (parent, input) = self.history[at as usize - 1];
            inputs.push(input);
            at = parent;
        }
        let mut actor = P::born(&self.bounds);
        for input in inputs.into_iter().rev() {
            actor.live(input, &mut Vec::new()).expect("what went well once goes well again");
        }
        actor
    }

    fn enter(&mut self, view: P::View, from: StateId, by: P::Input) -> StateId {
        if let Some(&id) = self.ids.get(&view) {
            return id;
        }
        let id = StateId::try_from(self.views.len()).expect("at most 2^32 states of one kind of party");
        self.views.push(view.clone());
        self.ids.insert(view, id);
        self.history.push((from, by));
        let mut renamed = [None; 8];
        renamed[0] = Some(id);
        self.renamed.push(renamed);
        id
    }
}
