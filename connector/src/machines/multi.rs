//! Several connectors for one request (P/D and offload): who loads its prefix, who is asked when it is over, and when
//! its blocks are nobody's any more.
//!
//! ```text
//!   load:    Looking ─ load(who has it) ─▶ Loading(first of them) ─ loaded ─▶ Looking
//!                                             │ failed: that one is not asked again;
//!                                             └ policy recompute: look again    policy fail: the request fails
//!
//!   end:     Running ─ finish, abort ─▶ Ending: every child is asked once, in order
//!                                         │ each answers: holds ─▶ lets go later
//!                                         │               nothing
//!                                         └ when the last has let go ─▶ Free: the blocks come back
//! ```
//!
//! - **Saved to all**: each child stores what it wants of what the request computes; nobody asks the others.
//! - **Loaded from the first that has the prefix**, in the order of the children. A request with a handoff asks P/D
//!   first, because its producer computed the very prompt; the others are its fallback where the policy is to
//!   recompute.
//! - **Notices** (early rejection, release) are offered to the children in order; the first that knows the handoff
//!   takes it: [`first_that_knows`].
//!
//! Invariants:
//! - [`Action::Ask`] comes exactly once per child (invariant 7), however often the request is finished or aborted.
//! - [`Action::FreeBlocks`] comes exactly once, after every child has answered and every holder has let go.
//! - An event that no longer matters (repeated, late, unknown) changes nothing and is counted (invariant 9).
//!
//! The table of every state and event is a golden file, `connector/tests/golden/multi.txt`.

use crate::machines::fetch::LoadFailurePolicy;

/// Children of one multi-connector at most.
pub const CHILDREN_MAX: usize = 4;

/// A child, counted from 0 in the order in which they are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Child(pub u8);

/// A set of children.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Children(u8);

impl Children {
    /// Nobody.
    pub const NONE: Self = Self(0);

    /// The first `count`.
    ///
    /// # Panics
    /// With more than [`CHILDREN_MAX`].
    #[must_use]
    pub const fn first(count: usize) -> Self {
        assert!(count <= CHILDREN_MAX);
        Self((1 << count) - 1)
    }

    /// With one more.
    #[must_use]
    pub const fn with(self, child: Child) -> Self {
        Self(self.0 | 1 << child.0)
    }

    /// Without one.
    #[must_use]
    pub const fn without(self, child: Child) -> Self {
        Self(self.0 & !(1 << child.0))
    }

    /// Whether it is in.
    #[must_use]
    pub const fn contains(self, child: Child) -> bool {
        (child.0 as usize) < CHILDREN_MAX && self.0 & (1 << child.0) != 0
    }

    /// Whether nobody is in.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// In order.
    pub fn iter(self) -> impl Iterator<Item = Child> {
        (0..CHILDREN_MAX as u8).map(Child).filter(move |&child| self.contains(child))
    }
}

/// A child's answer to [`Action::Ask`], its `request_finished`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// It keeps blocks, and lets go later.
    Holds,
    /// It keeps nothing.
    Nothing,
}

/// What can happen to a request with several connectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The request wants to run; these children have (some of) its prefix.
    Load(Children),
    /// A child's load is over and verified.
    Loaded(Child),
    /// A child's load delivered nothing.
    LoadFailed(Child),
    /// The request was preempted: what was loaded is lost, and every child may be asked again.
    Preempted,
    /// The request has ended by itself.
    Finish,
    /// The request was aborted.
    Abort,
    /// A child's answer.
    Answered(Child, Answer),
    /// A child holds nothing any more.
    LetGo(Child),
}

/// What the owner must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Let this child load.
    LoadFrom(Child),
    /// Nobody has the prefix: compute it.
    Compute,
    /// Ask again who has the prefix: the child that was to load it could not.
    LookAgain,
    /// End the request with an error: the policy is to fail.
    Fail(Child),
    /// Call this child's `request_finished`.
    Ask(Child),
    /// Nobody holds the request's blocks any more.
    FreeBlocks,
}

/// One request and its connectors. Not `Clone`: it stands for blocks that come back once.
#[derive(Debug)]
pub struct Multi {
    children: Children,
    policy: LoadFailurePolicy,
    loading: Option<Child>,
    /// Could not deliver; not asked again for this request.
    failed: Children,
    over: bool,
    /// Asked, and not answered yet.
    asked: Children,
    holding: Children,
    free: bool,
    ignored: u32,
}

impl Multi {
    /// A request that runs with these children.
    #[must_use]
    pub fn new(children: Children, policy: LoadFailurePolicy) -> Self {
        Self {
            children,
            policy,
            loading: None,
            failed: Children::NONE,
            over: false,
            asked: Children::NONE,
            holding: Children::NONE,
            free: false,
            ignored: 0,
        }
    }

    /// The child that loads now.
    #[must_use]
    pub fn loading(&self) -> Option<Child> {
        self.loading
    }

    /// Children that hold blocks of a request that is over.
    #[must_use]
    pub fn holding(&self) -> Children {
        self.holding
    }

    /// Whether the request is over and its blocks are nobody's.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.free
    }

    /// Events so far that changed nothing.
    #[must_use]
    pub fn ignored(&self) -> u32 {
        self.ignored
    }

    /// Moves the request by one event and says what its owner must do, in order.
    ///
    /// Every event is allowed in every state.
    pub fn apply(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Load(who) if !self.over && self.loading.is_none() => self.load(who),
            Event::Loaded(child) if !self.over && self.loading == Some(child) => {
                self.loading = None;
                Vec::new()
            }
            Event::LoadFailed(child) if !self.over && self.loading == Some(child) => self.load_failed(child),
            Event::Preempted if !self.over && self.loading.is_none() && !self.failed.is_empty() => {
                self.failed = Children::NONE;
                Vec::new()
            }
            Event::Finish | Event::Abort if !self.over => self.end(),
            Event::Answered(child, answer) if self.asked.contains(child) => {
                self.asked = self.asked.without(child);
                if answer == Answer::Holds {
                    self.holding = self.holding.with(child);
                }
                self.perhaps_free()
            }
            // A child may let go before its own answer is booked: the answer is then late.
            Event::LetGo(child) if self.asked.contains(child) || self.holding.contains(child) => {
                self.asked = self.asked.without(child);
                self.holding = self.holding.without(child);
                self.perhaps_free()
            }
            Event::Load(_)
            | Event::Loaded(_)
            | Event::LoadFailed(_)
            | Event::Preempted
            | Event::Finish
            | Event::Abort
            | Event::Answered(..)
            | Event::LetGo(_) => {
                self.ignored = self.ignored.saturating_add(1);
                Vec::new()
            }
        }
    }

    fn load(&mut self, who: Children) -> Vec<Action> {
        let willing = |child: &Child| who.contains(*child) && !self.failed.contains(*child);
        let first = self.children.iter().find(willing);
        self.loading = first;
        vec![first.map_or(Action::Compute, Action::LoadFrom)]
    }

    fn load_failed(&mut self, child: Child) -> Vec<Action> {
        self.loading = None;
        self.failed = self.failed.with(child);
        match self.policy {
            LoadFailurePolicy::Recompute => vec![Action::LookAgain],
            LoadFailurePolicy::Fail => vec![Action::Fail(child)],
        }
    }

    fn end(&mut self) -> Vec<Action> {
        self.over = true;
        self.loading = None;
        self.asked = self.children;
        let mut actions: Vec<Action> = self.children.iter().map(Action::Ask).collect();
        actions.extend(self.perhaps_free());
        actions
    }

    fn perhaps_free(&mut self) -> Vec<Action> {
        if self.over && !self.free && self.asked.is_empty() && self.holding.is_empty() {
            self.free = true;
            return vec![Action::FreeBlocks];
        }
        Vec::new()
    }
}

/// Offers a notice about a handoff to the children in order; the first that knows it answers, and nobody after it is
/// asked. `None` when nobody does.
///
/// Of P/D and offload only P/D has handoffs; where several of them are in one process (data-parallel ranks) each is a
/// child.
pub fn first_that_knows<C, R>(
    children: impl IntoIterator<Item = C>,
    ask: impl FnMut(C) -> Option<R>,
) -> Option<R> {
    children.into_iter().find_map(ask)
}

#[cfg(test)]
mod tests;
