//! Several connectors for one request (P/D and offload): the source of its prefix, and the release of its blocks.
//!
//! ```text
//!   load:    Idle ─ load(children with the prefix) ─▶ Loading(first of them) ─ loaded ─▶ Idle
//!                                                        │ failed: that child is not used again;
//!                                                        └ policy recompute: retry lookup   policy fail: fail
//!
//!   end:     Running ─ finish, abort ─▶ Ending: every child is finished once, in order
//!                                         │ replies: holds ─▶ released later
//!                                         │          nothing
//!                                         └ after the last release ─▶ Freed: the blocks are freed
//! ```
//!
//! - **Saved to all**: each child stores its selection of the computed blocks, independently of the others.
//! - **Loaded from the first child with the prefix**, in the order of the children. P/D comes first for a request with
//!   a handoff, because the producer computed this prompt. The others are the fallback under the policy to recompute.
//! - **Notices** (early rejection, release) are offered to the children in order. The first child that knows the
//!   handoff handles the notice: [`first_reply`].
//!
//! Invariants:
//! - [`Action::FinishChild`] is returned exactly once per child (invariant 7), for any number of finishes and aborts.
//! - [`Action::FreeBlocks`] is returned exactly once, after every child has replied and every holder has released.
//! - An irrelevant event (repeated, late, unknown) changes nothing and is counted (invariant 9).
//!
//! The table of every state and event is a golden file, `connector/tests/golden/multi.txt`.

use crate::machines::fetch::LoadFailurePolicy;

/// Children of one multi-connector at most.
pub const CHILDREN_MAX: usize = 4;

/// A child, counted from 0 in the order of lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Child(pub u8);

/// A set of children.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Children(u8);

impl Children {
    /// No child.
    pub const NONE: Self = Self(0);

    /// The first `count` children.
    ///
    /// # Panics
    /// If `count` exceeds [`CHILDREN_MAX`].
    #[must_use]
    pub const fn first(count: usize) -> Self {
        assert!(count <= CHILDREN_MAX);
        Self((1 << count) - 1)
    }

    /// The set with this child.
    #[must_use]
    pub const fn with(self, child: Child) -> Self {
        Self(self.0 | 1 << child.0)
    }

    /// The set without this child.
    #[must_use]
    pub const fn without(self, child: Child) -> Self {
        Self(self.0 & !(1 << child.0))
    }

    /// Whether the set contains this child.
    #[must_use]
    pub const fn contains(self, child: Child) -> bool {
        (child.0 as usize) < CHILDREN_MAX && self.0 & (1 << child.0) != 0
    }

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The children, in order.
    pub fn iter(self) -> impl Iterator<Item = Child> {
        (0..CHILDREN_MAX as u8).map(Child).filter(move |&child| self.contains(child))
    }
}

/// A child's reply to [`Action::FinishChild`], its `request_finished`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChildReply {
    /// The child holds blocks and releases them later.
    Holds,
    /// The child holds no blocks.
    Nothing,
}

/// What can happen to a request with several connectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The request is to run, and these children have all or a part of its prefix.
    Load(Children),
    /// A child's load is complete and verified.
    Loaded(Child),
    /// A child's load failed.
    LoadFailed(Child),
    /// The request was preempted: the loaded blocks are lost, and every child may be used again.
    Preempted,
    /// The request has ended by itself.
    Finish,
    /// The request was aborted.
    Abort,
    /// A child's reply.
    Replied(Child, ChildReply),
    /// A child holds no blocks any more.
    Released(Child),
}

/// What the owner must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Load the prefix from this child.
    LoadFrom(Child),
    /// No child has the prefix: compute it.
    Compute,
    /// Look the prefix up again, because the load from a child failed.
    RetryLookup,
    /// End the request with an error: the policy is to fail.
    Fail(Child),
    /// Call this child's `request_finished`.
    FinishChild(Child),
    /// Free the request's blocks: no child holds them.
    FreeBlocks,
}

/// One request and its connectors. Not `Clone`: its blocks are freed once.
#[derive(Debug)]
pub struct MultiConnectorRequest {
    children: Children,
    policy: LoadFailurePolicy,
    loading: Option<Child>,
    /// Children whose load failed. They are not used again for this request.
    failed: Children,
    ended: bool,
    /// Children that were finished and have not replied yet.
    awaiting_reply: Children,
    holding: Children,
    freed: bool,
    ignored: u32,
}

impl MultiConnectorRequest {
    /// A running request with these children.
    #[must_use]
    pub fn new(children: Children, policy: LoadFailurePolicy) -> Self {
        Self {
            children,
            policy,
            loading: None,
            failed: Children::NONE,
            ended: false,
            awaiting_reply: Children::NONE,
            holding: Children::NONE,
            freed: false,
            ignored: 0,
        }
    }

    /// The child that loads now.
    #[must_use]
    pub fn loading(&self) -> Option<Child> {
        self.loading
    }

    /// Children that hold blocks of an ended request.
    #[must_use]
    pub fn holding(&self) -> Children {
        self.holding
    }

    /// Whether the request has ended and its blocks are freed.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.freed
    }

    /// Events so far that changed nothing.
    #[must_use]
    pub fn ignored(&self) -> u32 {
        self.ignored
    }

    /// Applies one event and returns the actions for the owner, in order.
    ///
    /// Every event is allowed in every state.
    pub fn apply(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Load(children) if !self.ended && self.loading.is_none() => self.load(children),
            Event::Loaded(child) if !self.ended && self.loading == Some(child) => {
                self.loading = None;
                Vec::new()
            }
            Event::LoadFailed(child) if !self.ended && self.loading == Some(child) => self.load_failed(child),
            Event::Preempted if !self.ended && self.loading.is_none() && !self.failed.is_empty() => {
                self.failed = Children::NONE;
                Vec::new()
            }
            Event::Finish | Event::Abort if !self.ended => self.end(),
            Event::Replied(child, answer) if self.awaiting_reply.contains(child) => {
                self.awaiting_reply = self.awaiting_reply.without(child);
                if answer == ChildReply::Holds {
                    self.holding = self.holding.with(child);
                }
                self.free_if_released()
            }
            // A child may release before its reply arrives. The reply is then late.
            Event::Released(child) if self.awaiting_reply.contains(child) || self.holding.contains(child) => {
                self.awaiting_reply = self.awaiting_reply.without(child);
                self.holding = self.holding.without(child);
                self.free_if_released()
            }
            Event::Load(_)
            | Event::Loaded(_)
            | Event::LoadFailed(_)
            | Event::Preempted
            | Event::Finish
            | Event::Abort
            | Event::Replied(..)
            | Event::Released(_) => {
                self.ignored = self.ignored.saturating_add(1);
                Vec::new()
            }
        }
    }

    fn load(&mut self, having: Children) -> Vec<Action> {
        let usable = |child: &Child| having.contains(*child) && !self.failed.contains(*child);
        let first = self.children.iter().find(usable);
        self.loading = first;
        vec![first.map_or(Action::Compute, Action::LoadFrom)]
    }

    fn load_failed(&mut self, child: Child) -> Vec<Action> {
        self.loading = None;
        self.failed = self.failed.with(child);
        match self.policy {
            LoadFailurePolicy::Recompute => vec![Action::RetryLookup],
            LoadFailurePolicy::Fail => vec![Action::Fail(child)],
        }
    }

    fn end(&mut self) -> Vec<Action> {
        self.ended = true;
        self.loading = None;
        self.awaiting_reply = self.children;
        let mut actions: Vec<Action> = self.children.iter().map(Action::FinishChild).collect();
        actions.extend(self.free_if_released());
        actions
    }

    fn free_if_released(&mut self) -> Vec<Action> {
        if self.ended && !self.freed && self.awaiting_reply.is_empty() && self.holding.is_empty() {
            self.freed = true;
            return vec![Action::FreeBlocks];
        }
        Vec::new()
    }
}

/// Offers a notice about a handoff to the children in order and returns the reply of the first child that knows it.
///
/// Of P/D and offload only P/D has handoffs. With data-parallel ranks in one process, each P/D connector is a child.
pub fn first_reply<C, R>(
    children: impl IntoIterator<Item = C>,
    ask: impl FnMut(C) -> Option<R>,
) -> Option<R> {
    children.into_iter().find_map(ask)
}

#[cfg(test)]
mod tests;
