//! Steps over time: admission, the work of a step and its duration.

use baton_connector_leases::event_log::RequestEvent;

use super::{Action, CATCH_UP_US, Core, Leg, Registration, RequestEnd, RequestPhase, Step, Ticket, us};
use crate::sim::engines::leases::LeaseKey;
use crate::sim::engines::pool::BlockHolder;

impl Core {
    /// Processes everything that is due.
    pub(in crate::sim::engines) fn advance(&mut self, now_us: u64) {
        self.end_writes(now_us);
        while let Some(closed) = self.leases.expire(now_us) {
            self.record_closed_lease(closed, now_us);
        }
        let mut begins_us = now_us;
        loop {
            if let Some(step) = &self.step {
                if step.ends_us > now_us {
                    return;
                }
                // The next step begins when this one ends, not when the driver wakes.
                begins_us = step.ends_us.max(now_us.saturating_sub(CATCH_UP_US));
                let step = self.step.take().expect("looked at above");
                self.end_step(step, now_us);
            }
            self.admit();
            if !self.begin_step(begins_us.max(self.stalled_until_us)) {
                return;
            }
        }
    }

    /// When the next action is due.
    pub(in crate::sim::engines) fn next_us(&self) -> Option<u64> {
        let step = self.step.as_ref().map(|step| step.ends_us);
        step.into_iter().chain(self.leases.next_end_us()).chain(self.push.next_us()).min()
    }

    fn admit(&mut self) {
        while self.running.len() < self.plan.running_max
            && let Some(ticket) = self.ready.pop_front()
        {
            self.run(ticket);
        }
        while self.running.len() < self.plan.running_max
            && let Some(&ticket) = self.waiting.front()
        {
            let request = self.requests.get_mut(&ticket).expect("a known ticket");
            let tokens = request.sent.prompt
                + match request.sent.leg {
                    // The last token's KV is not stored.
                    Leg::Prefill => request.sent.max_tokens - 1,
                    Leg::Decode | Leg::Whole => request.sent.max_tokens,
                };
            let needs = tokens.div_ceil(self.plan.block_tokens);
            let held = if request.sent.source.is_some() { BlockHolder::Landing } else { BlockHolder::Active };
            // Requests are admitted in order.
            let Some(blocks) = self.pool.take(needs, held) else { return };
            request.blocks = blocks;
            self.waiting.pop_front();
            match request.sent.source.clone() {
                None => self.run(ticket),
                Some(source) => {
                    request.phase = RequestPhase::Fetching;
                    let (action, blocks) = match source.lease {
                        LeaseKey::Unnamed => {
                            let prompt = request.blocks[..request.sent.contents.len()].to_vec();
                            let registration = Registration::new(ticket, &request.sent.internal, prompt);
                            let blocks = registration.blocks.len();
                            (Action::Register(ticket, source, registration), blocks)
                        }
                        LeaseKey::Handle(_) | LeaseKey::Request(_) => {
                            let blocks = source.blocks.len();
                            (Action::Fetch(ticket, source), blocks)
                        }
                    };
                    self.log.emit(0, &request.sent.internal, 0, RequestEvent::Fetching(blocks));
                    self.actions.push(action);
                }
            }
        }
    }

    fn run(&mut self, ticket: Ticket) {
        let request = self.requests.get_mut(&ticket).expect("a known ticket");
        request.phase = RequestPhase::Running;
        self.log.emit(0, &request.sent.internal, 0, RequestEvent::Started(request.there));
        self.running.push(ticket);
    }

    fn begin_step(&mut self, begins_us: u64) -> bool {
        if self.running.is_empty() {
            return false;
        }
        let (mut room, mut work, mut took_us, mut decodes) = (self.plan.step_tokens, Vec::new(), 0, false);
        for &ticket in &self.running {
            let request = self.requests.get_mut(&ticket).expect("a known ticket");
            let left = request.sent.prompt - request.there;
            if left == 0 {
                decodes = true;
                work.push((ticket, 0));
                continue;
            }
            let tokens = left.min(room);
            if tokens == 0 {
                continue;
            }
            room -= tokens;
            // One remaining token after a read counts as decode.
            if left == 1 && request.there > 0 && !request.begun {
                decodes = true;
            } else {
                let overhead_us = if request.begun { 0 } else { us(self.plan.prefill_overhead) };
                took_us += overhead_us
                    + (tokens as u64 * 1_000_000).checked_div(self.plan.prefill_rate).unwrap_or(0);
            }
            request.begun = true;
            work.push((ticket, tokens));
        }
        took_us += if decodes { us(self.plan.decode_step) } else { 0 };
        self.step = Some(Step { ends_us: begins_us + took_us, work });
        true
    }

    fn end_step(&mut self, step: Step, now_us: u64) {
        self.counts.steps += 1;
        for (ticket, tokens) in step.work {
            let Some(request) = self.requests.get_mut(&ticket) else { continue };
            if request.aborting {
                // An abort takes precedence over the result of the step.
                self.end(ticket, RequestEnd::Aborted);
                continue;
            }
            if tokens > 0 {
                let before = request.there;
                request.there += tokens;
                request.computed += tokens;
                self.counts.prompt_tokens += tokens as u64;
                self.log.emit(0, &request.sent.internal, 0, RequestEvent::Computed(request.there));
                let touched = before / self.plan.block_tokens..request.there.div_ceil(self.plan.block_tokens);
                for index in touched.start.max(request.read)..touched.end {
                    self.pool.contents().write(request.blocks[index], request.sent.contents[index]);
                }
                if request.there < request.sent.prompt {
                    continue;
                }
            }
            self.generate_word(ticket, now_us);
        }
    }

    /// The next word depends on the current contents of the blocks.
    fn generate_word(&mut self, ticket: Ticket, now_us: u64) {
        let request = self.requests.get_mut(&ticket).expect("it was looked up");
        let (number, contents) = (request.words.len(), self.pool.contents());
        let word = contents.generate(&request.blocks, request.sent.prompt, number, self.plan.block_tokens);
        request.words.push(word);
        self.counts.generation_tokens += 1;
        if number == 0 {
            self.log.emit(0, &request.sent.internal, 0, RequestEvent::FirstToken);
        }
        request.sent.progress.notify_one();
        if request.words.len() >= request.sent.max_tokens {
            match request.sent.leg {
                Leg::Prefill => self.open_lease(ticket, now_us),
                Leg::Decode | Leg::Whole => self.end(ticket, RequestEnd::Length),
            }
        }
    }
}
