//! Time of one rank: timeouts, transfers, admission, the work of a step and its duration.

use std::borrow::Cow;

use baton_connector_leases::event_log::RequestEvent;

use super::{Drain, EndCause, LegPhase, RankLegEnd, SglangRank, TimerOf, us};
use crate::sim::engines::pool::BlockHolder;
use crate::sim::engines::role::Role;
use crate::sim::engines::sglang::message::{LegTicket, PeerMessage};

/// After a longer pause (of a stopped process), steps are not caught up.
const CATCH_UP_US: u64 = 100_000;

/// A step in progress.
#[derive(Debug)]
pub(super) struct RankStep {
    pub(super) ends_us: u64,
    /// Prompt tokens of each leg. 0 on D, which decodes.
    work: Vec<(LegTicket, usize)>,
}

impl SglangRank {
    /// Processes everything that is due.
    pub(in crate::sim::engines::sglang) fn advance(&mut self, now_us: u64) {
        let mut begins_us = now_us;
        loop {
            self.fire_timers(now_us);
            if let Some(step) = &self.step {
                if step.ends_us > now_us {
                    return self.admit(now_us);
                }
                // The next step begins when this one ends, not when the driver wakes.
                begins_us = step.ends_us.max(now_us.saturating_sub(CATCH_UP_US));
                let step = self.step.take().expect("looked at above");
                self.end_step(step, now_us);
                self.fire_timers(now_us);
            }
            self.admit(now_us);
            if !self.begin_step(begins_us.max(self.stalled_until_us)) {
                return;
            }
        }
    }

    /// When the next action is due.
    pub(in crate::sim::engines::sglang) fn next_us(&self) -> Option<u64> {
        let step = self.step.as_ref().map(|step| step.ends_us);
        step.into_iter().chain(self.timers.first().map(|(at_us, _)| *at_us)).min()
    }

    fn fire_timers(&mut self, now_us: u64) {
        while let Some((_, of)) = self.timers.first().copied().filter(|(at_us, _)| *at_us <= now_us) {
            self.timers.pop_first();
            match of {
                TimerOf::Drain(ticket) => self.end_drain(ticket),
                TimerOf::Leg(ticket) => {
                    let (role, leg) = (self.traits.role, self.leg(ticket));
                    leg.timer_us = None;
                    let waited = (now_us - leg.since_us) as f64 / 1e6;
                    let timeout = |state: &str, room: u64| {
                        format!("Request {room} timed out after {waited:.1}s in KVPoll.{state}")
                    };
                    match (role, leg.phase) {
                        (Role::Prefill, LegPhase::Transferring) => self.end_transfer(ticket, now_us),
                        (Role::Prefill, _) => {
                            let reason = timeout("Bootstrapping", leg.sent.room);
                            self.fail(ticket, &reason, EndCause::Error, now_us);
                        }
                        (Role::Decode, _) => {
                            let reason = timeout("WaitingForInput", leg.sent.room);
                            self.fail(ticket, &reason, EndCause::Error, now_us);
                        }
                    }
                }
            }
        }
    }

    /// P's transfer has ended: D has the pages and the first token.
    fn end_transfer(&mut self, ticket: LegTicket, now_us: u64) {
        let leg = &self.legs[&ticket];
        let (room, word) = (leg.sent.room, leg.words.first().map(|word| word.clone().into_owned()));
        let contents = self.contents_of(&leg.pages);
        if let Some((to, pages)) = self.rooms.peer(room).cloned() {
            self.send(to.peer, PeerMessage::Written { room, leg: to.leg, pages, contents, word });
        }
        self.end(ticket, RankLegEnd::Length, now_us);
    }

    pub(super) fn contents_of(&self, pages: &[u32]) -> Vec<u64> {
        pages.iter().map(|&page| self.pool.contents().read(page)).collect()
    }

    /// The last write into an ended leg's pages is over, or the wait for it.
    pub(super) fn end_drain(&mut self, ticket: LegTicket) {
        match self.drains.remove(&ticket) {
            None => {}
            Some(Drain::Pages { id, pages }) => {
                self.pool.give_back(&pages, BlockHolder::Landing);
                self.log.emit(self.traits.number, &id, 0, RequestEvent::Freed(pages.len()));
            }
            Some(Drain::Write { room, to, pages, contents, acks }) => {
                self.send(to.peer, PeerMessage::Written { room, leg: to.leg, pages, contents, word: None });
                if acks {
                    self.send(to.peer, PeerMessage::AbortAck { leg: to.leg });
                }
            }
        }
    }

    fn admit(&mut self, now_us: u64) {
        if self.traits.role == Role::Decode {
            self.preallocate(now_us);
        }
        while self.running.len() < self.traits.plan.running_max
            && let Some(&ticket) = self.waiting.front()
        {
            if self.traits.role == Role::Prefill {
                // The one generated token's KV is not stored.
                let needs = self.legs[&ticket].sent.prompt.div_ceil(self.traits.plan.block_tokens);
                // Legs are admitted in order.
                let Some(pages) = self.pool.take(needs, BlockHolder::Active) else { return };
                self.leg(ticket).pages = pages;
            }
            self.waiting.pop_front();
            let leg = self.leg(ticket);
            leg.phase = LegPhase::Running;
            let there = leg.there;
            self.running.push(ticket);
            if self.traits.role == Role::Prefill {
                self.emit(ticket, RequestEvent::Started(there));
            }
        }
    }

    fn begin_step(&mut self, begins_us: u64) -> bool {
        if self.running.is_empty() {
            return false;
        }
        let plan = &self.traits.plan;
        let (mut budget, mut work, mut took_us) = (plan.step_tokens, Vec::new(), 0);
        for &ticket in &self.running {
            let leg = &self.legs[&ticket];
            if self.traits.role == Role::Decode {
                took_us = us(plan.decode_step);
                work.push((ticket, 0));
                continue;
            }
            let tokens = (leg.sent.prompt - leg.there).min(budget);
            if tokens == 0 {
                continue;
            }
            budget -= tokens;
            let overhead_us = if leg.there == 0 { us(plan.prefill_overhead) } else { 0 };
            took_us += overhead_us + (tokens as u64 * 1_000_000).checked_div(plan.prefill_rate).unwrap_or(0);
            work.push((ticket, tokens));
        }
        self.step = Some(RankStep { ends_us: begins_us + took_us, work });
        true
    }

    fn end_step(&mut self, step: RankStep, now_us: u64) {
        self.counts.steps += 1;
        for (ticket, tokens) in step.work {
            let Some(leg) = self.legs.get_mut(&ticket).filter(|leg| leg.phase == LegPhase::Running) else {
                continue;
            };
            if let Some(cause) = leg.aborting {
                // An abort takes precedence over the result of the step.
                match cause {
                    // P finds the room's failure before it sends the next chunk.
                    EndCause::Peer => self.fail_running(ticket, now_us),
                    EndCause::Disconnect | EndCause::Verb | EndCause::Error => {
                        self.end(ticket, RankLegEnd::Aborted, now_us);
                    }
                }
                continue;
            }
            let size = self.traits.plan.block_tokens;
            if tokens > 0 {
                let before = leg.there;
                leg.there += tokens;
                let touched = before / size..leg.there.div_ceil(size);
                for index in touched {
                    self.pool.contents().write(leg.pages[index], leg.sent.contents[index]);
                }
                let (there, prompt) = (leg.there, leg.sent.prompt);
                self.counts.prompt_tokens += tokens as u64;
                self.emit(ticket, RequestEvent::Computed(there));
                if there < prompt {
                    continue;
                }
            }
            self.generate_word(ticket, now_us);
        }
    }

    fn generate_word(&mut self, ticket: LegTicket, now_us: u64) {
        let (contents, size) = (self.pool.contents(), self.traits.plan.block_tokens);
        let leg = &self.legs[&ticket];
        let word = contents.generate(&leg.pages, leg.sent.prompt, leg.words.len(), size);
        self.counts.generation_tokens += 1;
        self.add_word(ticket, Cow::Borrowed(word));
        match self.traits.role {
            Role::Prefill => self.begin_transfer(ticket, now_us),
            Role::Decode => self.end_if_complete(ticket, now_us),
        }
    }

    pub(super) fn add_word(&mut self, ticket: LegTicket, word: Cow<'static, str>) {
        let leg = self.leg(ticket);
        leg.words.push(word);
        leg.sent.progress.notify_one();
        if leg.words.len() == 1 {
            self.emit(ticket, RequestEvent::FirstToken);
        }
    }

    pub(super) fn end_if_complete(&mut self, ticket: LegTicket, now_us: u64) {
        let leg = &self.legs[&ticket];
        if leg.words.len() >= leg.sent.max_tokens {
            self.end(ticket, RankLegEnd::Length, now_us);
        }
    }

    /// P writes the prompt's pages into D's, which takes a time.
    fn begin_transfer(&mut self, ticket: LegTicket, now_us: u64) {
        self.running.retain(|of| *of != ticket);
        let leg = self.leg(ticket);
        (leg.phase, leg.since_us) = (LegPhase::Transferring, now_us);
        let (computed, blocks) = (leg.there, leg.pages.len());
        self.pool.become_of(blocks, BlockHolder::Active, BlockHolder::Leased);
        self.emit(ticket, RequestEvent::LeaseOpened { blocks, left: None });
        self.emit(ticket, RequestEvent::Ended { outcome: "lent", generated: 1, computed, blocks });
        let takes_us = (blocks as u64 * 1_000_000).checked_div(self.traits.plan.fetch_rate).unwrap_or(0);
        self.set_timer(ticket, now_us + takes_us);
    }
}
