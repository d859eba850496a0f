//! The cast: every state of one kind of party that has come up, each reached by the real machine.
//!
//! The machines are not `Clone`: they stand for blocks that are given back once. So a party's state is never copied.
//! It is known by its view (a plain value), and when an event is to be applied to it, a new party is born and lives
//! through the shortest history that led there. What came of it is remembered: each event is applied to each state
//! once, however many states of the whole system it is part of.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::rc::Rc;

use crate::bounds::Bounds;
use crate::explore::Mixed;
use crate::names::Renaming;

/// One kind of party: a shell of the model around machines of the product.
pub(crate) trait Party {
    type Input: Copy + Eq + Hash + Debug;
    type Output: Copy + Debug;
    /// All that its future depends on.
    type View: Clone + Eq + Hash + Debug;

    fn born(bounds: &Bounds) -> Self;

    /// Lives through one event. An error says what it broke.
    fn live(&mut self, input: Self::Input, says: &mut Vec<Self::Output>) -> Result<(), String>;

    fn view(&self) -> Self::View;

    fn renamed(input: Self::Input, by: Renaming) -> Self::Input;
}

/// A state of a party, by the order in which it came up. 0 is newly born.
pub(crate) type Role = u32;

/// What came of one event: the new state, and what the party said.
type Outcome<P> = Result<(Role, Rc<[<P as Party>::Output]>), String>;

/// See the module's documentation.
pub(crate) struct Cast<P: Party> {
    bounds: Bounds,
    views: Vec<P::View>,
    roles: HashMap<P::View, Role, Mixed>,
    /// Of each state but the first: from which other, by which event.
    history: Vec<(Role, P::Input)>,
    outcomes: HashMap<(Role, P::Input), Outcome<P>, Mixed>,
    renamed: Vec<[Option<Role>; 8]>,
}

impl<P: Party> Cast<P> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        let view = P::born(&bounds).view();
        Self {
            bounds,
            views: vec![view.clone()],
            roles: HashMap::from_iter([(view, 0)]),
            history: Vec::new(),
            outcomes: HashMap::default(),
            renamed: vec![[Some(0); 8]],
        }
    }

    pub(crate) fn view(&self, role: Role) -> &P::View {
        &self.views[role as usize]
    }

    /// States that have come up.
    pub(crate) fn len(&self) -> usize {
        self.views.len()
    }

    /// What comes of an event.
    pub(crate) fn tell(&mut self, role: Role, input: P::Input) -> Outcome<P> {
        if let Some(known) = self.outcomes.get(&(role, input)) {
            return known.clone();
        }
        let mut party = self.reborn(role);
        let mut says = Vec::new();
        let outcome = party.live(input, &mut says).map(|()| {
            let view = party.view();
            (self.enter(view, role, input), Rc::from(says))
        });
        self.outcomes.insert((role, input), outcome.clone());
        outcome
    }

    /// The state in which everything has its name changed.
    pub(crate) fn renamed(&mut self, role: Role, by: Renaming) -> Role {
        if let Some(known) = self.renamed[role as usize][usize::from(by.0)] {
            return known;
        }
        let (parent, input) = self.history[role as usize - 1];
        let parent = self.renamed(parent, by);
        let (other, _) = self.tell(parent, P::renamed(input, by)).expect("a renamed history is as good");
        self.renamed[role as usize][usize::from(by.0)] = Some(other);
        // Every renaming is its own inverse.
        let back = self.renamed(other, by);
        assert_eq!(back, role, "a state that does not rename back: {:?}", self.view(role));
        other
    }

    fn reborn(&self, role: Role) -> P {
        let mut inputs = Vec::new();
        let mut at = role;
        while at != 0 {
            let (parent, input) = self.history[at as usize - 1];
            inputs.push(input);
            at = parent;
        }
        let mut party = P::born(&self.bounds);
        for input in inputs.into_iter().rev() {
            party.live(input, &mut Vec::new()).expect("what went well once goes well again");
        }
        party
    }

    fn enter(&mut self, view: P::View, from: Role, by: P::Input) -> Role {
        if let Some(&role) = self.roles.get(&view) {
            return role;
        }
        let role = Role::try_from(self.views.len()).expect("at most 2^32 states of one kind of party");
        self.views.push(view.clone());
        self.roles.insert(view, role);
        self.history.push((from, by));
        let mut renamed = [None; 8];
        renamed[0] = Some(role);
        self.renamed.push(renamed);
        role
    }
}
