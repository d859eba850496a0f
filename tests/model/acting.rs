//! What each step does: to whom it is told, what they say, and what is on its way after it.

use baton_connector::fetch::Answer;

use crate::consumer::{self, Asked, Bytes, Worker};
use crate::messages::{Loss, Message};
use crate::mutations::Mutation;
use crate::names::{LeaseName, ReaderName, Req, place};
use crate::producer::{self, Content};
use crate::router::{self, Decoded, Prefilled, Streamed};
use crate::steps::{Memory, Mood, Step};
use crate::world::{Scene, World};

/// Nothing was broken, or what was.
type Held = Result<(), String>;

impl World {
    /// Lets one step happen.
    pub(crate) fn play(&mut self, scene: &mut Scene, step: Step) -> Held {
        match step {
            Step::Arrive(message, mood) => {
                self.take_off(scene, message);
                self.arrive(scene, message, mood)
            }
            Step::AskPrefill(req, p) => self.tell_router(scene, req, router::Input::AskPrefill(p)),
            Step::AskDecode(req, d) => self.tell_router(scene, req, router::Input::AskDecode(d)),
            Step::SkipPrefill(req) => self.tell_router(scene, req, router::Input::SkipPrefill),
            Step::HandoffSpent(req) => self.tell_router(scene, req, router::Input::HandoffSpent),
            Step::ProducerFailed(req) => self.tell_router(scene, req, router::Input::ProducerFailed),
            Step::NotAdmitted(req) => self.tell_router(scene, req, router::Input::NotAdmitted),
            Step::GiveUp(req) => self.tell_router(scene, req, router::Input::GiveUp),
            Step::ClientLeaves(req) => self.tell_router(scene, req, router::Input::ClientLeaves),
            Step::Start(p, req) => self.tell_producer(scene, p, producer::Input::Start(req)),
            Step::LendEarly(p, req) => self.tell_producer(scene, p, producer::Input::LendEarly(req)),
            Step::Finish(p, req) => self.tell_producer(scene, p, producer::Input::Finish(req)),
            Step::EndPrefill(p, req) => self.tell_producer(scene, p, producer::Input::EndPrefill(req)),
            Step::TakeMail(p, req) => self.tell_producer(scene, p, producer::Input::TakeMail(req)),
            Step::TimePasses(p) => self.tell_producer(scene, p, producer::Input::TimePasses(None)),
            Step::RestartPrefill(p) => self.tell_producer(scene, p, producer::Input::Restart),
            Step::Schedule(d, req) => self.tell_consumer(scene, d, consumer::Input::Schedule(req)),
            Step::FindCached(d, req) => self.tell_consumer(scene, d, consumer::Input::FindCached(req)),
            Step::AskToRead(d, req, rank) => self.ask_to_read(scene, (d, req, rank)),
            Step::AskAgain(d, req, rank) => self.ask_again(scene, (d, req, rank)),
            Step::Copy(d, req, rank) => self.copy(scene, d, req, rank),
            Step::StopRead(d, req, rank) => {
                self.tell_consumer(scene, d, consumer::Input::ReadEnds(req, rank))
            }
            Step::AskVerdict(d, req, rank) => self.ask_verdict(scene, (d, req, rank)),
            Step::Heartbeat(d, req) => self.heartbeat(scene, d, req),
            Step::Speak(d, req) => self.tell_consumer(scene, d, consumer::Input::Speak(req)),
            Step::Complete(d, req) => self.tell_consumer(scene, d, consumer::Input::Finish(req)),
            Step::RestartDecode(d) => self.tell_consumer(scene, d, consumer::Input::Restart),
            Step::RestartRouter => {
                scene.router_up = true;
                Ok(())
            }
            Step::ArriveTwice(_)
            | Step::Lose(_)
            | Step::Silence(_)
            | Step::PrefillSilence(_)
            | Step::ReadBreaks(..)
            | Step::AnswerLost(..)
            | Step::AskTwice(..)
            | Step::RunsOutEarly(..)
            | Step::AgesPass(_)
            | Step::CrashPrefill(_)
            | Step::CrashDecode(..)
            | Step::CrashRouter(_) => {
                scene.faults_left -= 1;
                *self.faults.entry(step.kind()).or_default() += 1;
                self.fault(scene, step)
            }
        }
    }

    fn fault(&mut self, scene: &mut Scene, step: Step) -> Held {
        match step {
            // It stays on its way.
            Step::ArriveTwice(message) => self.arrive(scene, message, Mood::Takes),
            Step::Lose(message) => {
                self.take_off(scene, message);
                match message.loss() {
                    Loss::Becomes(other) => self.send(scene, other),
                    Loss::BecomesBoth(one, other) => {
                        self.send(scene, one);
                        self.send(scene, other);
                    }
                    Loss::Vanishes | Loss::Impossible => {}
                }
                Ok(())
            }
            Step::Silence(req) => self.tell_router(scene, req, router::Input::Silence),
            Step::PrefillSilence(req) => self.tell_router(scene, req, router::Input::PrefillSilence),
            Step::ReadBreaks(d, req, rank) => {
                self.tell_consumer(scene, d, consumer::Input::ReadEnds(req, rank))
            }
            Step::AnswerLost(d, req, rank) => {
                // P has a reader of which D knows nothing; the end of the connection tells it.
                let (reader, lease) = self.reads(scene, (d, req, rank));
                self.read_begun(scene, reader, lease)?;
                self.send(scene, Message::ReaderLeaves(reader, lease));
                self.tell_consumer(scene, d, consumer::Input::ReadAsked(req, rank, Asked::Unreachable))
            }
            Step::AskTwice(d, req, rank) => {
                let (reader, lease) = self.reads(scene, (d, req, rank));
                self.read_done(scene, reader, lease)?;
                self.ask_verdict(scene, (d, req, rank))
            }
            Step::RunsOutEarly(p, renewed) => {
                self.tell_producer(scene, p, producer::Input::TimePasses(renewed))
            }
            Step::AgesPass(p) => self.tell_producer(scene, p, producer::Input::AgesPass),
            Step::CrashPrefill(p) => self.tell_producer(scene, p, producer::Input::Crash),
            Step::CrashDecode(d, memory) => {
                if memory == Memory::Lost {
                    self.forget(scene, |message| message.is_of_decode(d));
                }
                self.tell_consumer(scene, d, consumer::Input::Crash)
            }
            Step::CrashRouter(memory) => {
                scene.router_up = false;
                if memory == Memory::Lost {
                    self.forget(scene, Message::is_of_router);
                }
                for req in 0..self.bounds.requests {
                    if self.routers.view(scene.router[place(req)]).has_begun() {
                        self.tell_router(scene, req, router::Input::Crash)?;
                    }
                }
                Ok(())
            }
            _ => unreachable!("not a fault"),
        }
    }

    /// A message gets to whom it is for.
    fn arrive(&mut self, scene: &mut Scene, message: Message, mood: Mood) -> Held {
        match message {
            Message::Prefill(req, p) => {
                let admission = match mood {
                    Mood::Takes => producer::Admission::Take,
                    Mood::TooFull => producer::Admission::TooFull,
                    Mood::Refuses => producer::Admission::Refuse,
                };
                if self.producer_is_up(scene, p) {
                    return self.tell_producer(scene, p, producer::Input::Prefill(req, admission));
                }
                self.send(scene, Message::Prefilled(req, p, Prefilled::NotReached));
                Ok(())
            }
            Message::AbortPrefill(req, p) => self.tell_producer_if_up(scene, p, producer::Input::Abort(req)),
            Message::HangUpPrefill(req, p) => {
                self.tell_producer_if_up(scene, p, producer::Input::HangUp(req))
            }
            Message::Release(lease) | Message::Notice(_, lease) => self.release(scene, lease),
            Message::ReaderLeaves(reader, lease) => {
                let alive = self.producer_lives(scene, lease);
                let input = producer::Input::ReadFailed(lease.local, reader);
                if alive { self.tell_producer(scene, lease.p, input) } else { Ok(()) }
            }
            Message::Decode(req, d, lease) => {
                let admission = match mood {
                    Mood::Takes => consumer::Admission::Take,
                    Mood::TooFull => consumer::Admission::TooFull,
                    Mood::Refuses => consumer::Admission::Refuse,
                };
                if self.consumers.view(scene.decode[usize::from(d)]).alive {
                    return self.tell_consumer(scene, d, consumer::Input::Decode(req, lease, admission));
                }
                self.send(scene, Message::Decoded(req, d, Decoded::NotReached));
                Ok(())
            }
            Message::AbortDecode(req, d) => {
                self.tell_consumer_if_up(scene, d, None, consumer::Input::Abort(req))
            }
            Message::HangUpDecode(req, d) => {
                self.tell_consumer_if_up(scene, d, None, consumer::Input::HangUp(req))
            }
            Message::Verdict(ReaderName { d, life, req, rank }, answer) => {
                self.tell_consumer_if_up(scene, d, Some(life), consumer::Input::Verdict(req, rank, answer))
            }
            Message::LeaseGone(ReaderName { d, life, req, .. }) => {
                self.tell_consumer_if_up(scene, d, Some(life), consumer::Input::LeaseGone(req))
            }
            Message::Prefilled(req, p, what) => self.prefilled(scene, req, p, what),
            Message::PrefillEnds(req, p, lease) => self.prefill_ends(scene, req, p, lease),
            Message::Decoded(req, d, what) => {
                self.tell_router_if_it_lives(scene, req, router::Input::Decoded(asked(req, d), what))
            }
            Message::Streamed(req, d, how) => {
                self.tell_router_if_it_lives(scene, req, router::Input::Streamed(asked(req, d), how))
            }
        }
    }

    /// The answer of a prefill. If its connection is gone it cannot be written, and P takes its lease back.
    fn prefilled(&mut self, scene: &mut Scene, req: Req, p: u8, what: Prefilled) -> Held {
        let over = self.routers.view(scene.router[place(req)]).is_over();
        if over && self.bounds.has(Mutation::HangUpInsteadOfAbort) {
            return Ok(());
        }
        if self.routers.view(scene.router[place(req)]).open_prefill[usize::from(asked(req, p))] {
            return self.tell_router(scene, req, router::Input::Prefilled(asked(req, p), what));
        }
        match what {
            Prefilled::Lent(lease) | Prefilled::Lending(lease) => self.release(scene, lease),
            _ => Ok(()),
        }
    }

    /// The end of an answer that had lent before. The same.
    fn prefill_ends(&mut self, scene: &mut Scene, req: Req, p: u8, lease: Option<LeaseName>) -> Held {
        if self.routers.view(scene.router[place(req)]).open_prefill[usize::from(asked(req, p))] {
            return self.tell_router(scene, req, router::Input::PrefillEnds(asked(req, p), lease.is_some()));
        }
        lease.map_or(Ok(()), |lease| self.release(scene, lease))
    }

    fn release(&mut self, scene: &mut Scene, lease: LeaseName) -> Held {
        self.tell_producer_if_up(scene, lease.p, producer::Input::Release(lease.local))
    }

    fn reads(&self, scene: &Scene, (d, req, rank): (u8, Req, u8)) -> (ReaderName, LeaseName) {
        let job = self.consumers.view(scene.decode[usize::from(d)]).jobs[usize::from(req)].expect("it reads");
        (self.reader(scene, d, req, rank), job.lease.expect("it has a handoff"))
    }

    fn read_begun(
        &mut self,
        scene: &mut Scene,
        reader: ReaderName,
        lease: LeaseName,
    ) -> Result<Asked, String> {
        if !self.producer_is_up(scene, lease.p) {
            return Ok(Asked::Unreachable);
        }
        let input = producer::Input::ReadBegun(lease.local, reader);
        let said = self.ask_producer(scene, lease.p, input)?;
        Ok(match said {
            Some(producer::Output::Granted(block)) => Asked::Granted(block),
            Some(producer::Output::NotYet(block)) => Asked::NotYet(block),
            Some(producer::Output::Busy) => Asked::Refused,
            _ => Asked::Gone,
        })
    }

    fn ask_to_read(&mut self, scene: &mut Scene, who: (u8, Req, u8)) -> Held {
        let (reader, lease) = self.reads(scene, who);
        let asked = self.read_begun(scene, reader, lease)?;
        self.tell_consumer(scene, who.0, consumer::Input::ReadAsked(who.1, who.2, asked))
    }

    fn ask_again(&mut self, scene: &mut Scene, (d, req, rank): (u8, Req, u8)) -> Held {
        let (reader, lease) = self.reads(scene, (d, req, rank));
        let job = self.consumers.view(scene.decode[usize::from(d)]).jobs[usize::from(req)].expect("it reads");
        let Worker::Waiting(block) = job.workers[usize::from(rank)] else { unreachable!("it waits") };
        let asked = if self.producer_is_up(scene, lease.p) {
            match self.ask_producer(scene, lease.p, producer::Input::IsReady(lease.local, reader))? {
                Some(producer::Output::Ready) => Asked::Granted(block),
                _ => Asked::Gone,
            }
        } else {
            Asked::Unreachable
        };
        self.tell_consumer(scene, d, consumer::Input::ReadAsked(req, rank, asked))
    }

    /// Whatever is in the block at this moment.
    fn copy(&mut self, scene: &mut Scene, d: u8, req: Req, rank: u8) -> Held {
        let job = self.consumers.view(scene.decode[usize::from(d)]).jobs[usize::from(req)].expect("it reads");
        let (lease, worker) = (job.lease.expect("it has a handoff"), job.workers[usize::from(rank)]);
        let Worker::Granted(block) = worker else { unreachable!("it was granted") };
        let view = self.producers.view(scene.prefill[usize::from(lease.p)]);
        let good = view.alive && view.blocks[block.index()] == Content::Of(lease.local.tag());
        let bytes = if good { Bytes::Good } else { Bytes::Stale };
        self.tell_consumer(scene, d, consumer::Input::Copied(req, rank, bytes))
    }

    fn read_done(
        &mut self,
        scene: &mut Scene,
        reader: ReaderName,
        lease: LeaseName,
    ) -> Result<Answer, String> {
        if !self.producer_is_up(scene, lease.p) {
            return Ok(Answer::Unknown);
        }
        let said = self.ask_producer(scene, lease.p, producer::Input::ReadDone(lease.local, reader))?;
        Ok(if matches!(said, Some(producer::Output::Valid)) { Answer::Valid } else { Answer::Gone })
    }

    fn ask_verdict(&mut self, scene: &mut Scene, who: (u8, Req, u8)) -> Held {
        let (reader, lease) = self.reads(scene, who);
        let answer = self.read_done(scene, reader, lease)?;
        self.tell_consumer(scene, who.0, consumer::Input::AskVerdict(who.1, who.2))?;
        self.send(scene, Message::Verdict(reader, answer));
        Ok(())
    }

    fn heartbeat(&mut self, scene: &mut Scene, d: u8, req: Req) -> Held {
        let (reader, lease) = self.reads(scene, (d, req, 0));
        let said = self.ask_producer(scene, lease.p, producer::Input::Heartbeat(lease.local))?;
        if matches!(said, Some(producer::Output::Gone)) {
            self.send(scene, Message::LeaseGone(reader));
        }
        Ok(())
    }

    fn producer_is_up(&self, scene: &Scene, p: u8) -> bool {
        self.producers.view(scene.prefill[usize::from(p)]).alive
    }

    /// Whether P is still in the life in which it opened a lease.
    fn producer_lives(&self, scene: &Scene, lease: LeaseName) -> bool {
        let view = self.producers.view(scene.prefill[usize::from(lease.p)]);
        view.alive && view.life == lease.local.life
    }

    fn tell_router_if_it_lives(&mut self, scene: &mut Scene, req: Req, input: router::Input) -> Held {
        if self.routers.view(scene.router[place(req)]).crashed {
            return Ok(());
        }
        self.tell_router(scene, req, input)
    }

    fn tell_router(&mut self, scene: &mut Scene, req: Req, input: router::Input) -> Held {
        let role = &mut scene.router[place(req)];
        let (next, said) = self.routers.tell(*role, input)?;
        *role = next;
        for &output in said.iter() {
            let of = |at: u8| (req & 1 | at & 2, at & 1);
            let message = match output {
                router::Output::Prefill(at) => Message::Prefill(of(at).0, of(at).1),
                router::Output::Decode(at, lease) => Message::Decode(of(at).0, of(at).1, lease),
                router::Output::AbortPrefill(at) => Message::AbortPrefill(of(at).0, of(at).1),
                router::Output::Release(_) if self.bounds.foreign_router => continue,
                router::Output::Release(lease) => Message::Release(lease),
                router::Output::AbortDecode(at) => Message::AbortDecode(of(at).0, of(at).1),
                router::Output::HangUpPrefill(at) => Message::HangUpPrefill(of(at).0, of(at).1),
                router::Output::HangUpDecode(at) => Message::HangUpDecode(of(at).0, of(at).1),
            };
            self.send(scene, message);
        }
        Ok(())
    }

    fn tell_producer_if_up(&mut self, scene: &mut Scene, p: u8, input: producer::Input) -> Held {
        if self.producer_is_up(scene, p) { self.tell_producer(scene, p, input) } else { Ok(()) }
    }

    fn tell_producer(&mut self, scene: &mut Scene, p: u8, input: producer::Input) -> Held {
        self.ask_producer(scene, p, input).map(drop)
    }

    /// Tells a prefill engine; returns what it says to whoever asked.
    fn ask_producer(
        &mut self,
        scene: &mut Scene,
        p: u8,
        input: producer::Input,
    ) -> Result<Option<producer::Output>, String> {
        let role = &mut scene.prefill[usize::from(p)];
        let (next, said) = self.producers.tell(*role, input)?;
        *role = next;
        let mut answer = None;
        for &output in said.iter() {
            let (req, what) = match output {
                producer::Output::Lent(req, local) => (req, Prefilled::Lent(LeaseName { p, local })),
                producer::Output::Lending(req, local) => (req, Prefilled::Lending(LeaseName { p, local })),
                producer::Output::Ends(req, local) => {
                    let sealed = local.map(|local| LeaseName { p, local });
                    self.send(scene, Message::PrefillEnds(req, p, sealed));
                    continue;
                }
                producer::Output::Empty(req) => (req, Prefilled::Empty),
                producer::Output::TooFull(req) => (req, Prefilled::TooFull),
                producer::Output::Refused(req) => (req, Prefilled::Refused),
                producer::Output::Broken(req) => (req, Prefilled::Broken),
                direct => {
                    answer = Some(direct);
                    continue;
                }
            };
            self.send(scene, Message::Prefilled(req, p, what));
        }
        Ok(answer)
    }

    fn tell_consumer_if_up(
        &mut self,
        scene: &mut Scene,
        d: u8,
        life: Option<u8>,
        input: consumer::Input,
    ) -> Held {
        let view = self.consumers.view(scene.decode[usize::from(d)]);
        let there = view.alive && life.is_none_or(|life| life == view.life);
        if there { self.tell_consumer(scene, d, input) } else { Ok(()) }
    }

    fn tell_consumer(&mut self, scene: &mut Scene, d: u8, input: consumer::Input) -> Held {
        let life = self.consumers.view(scene.decode[usize::from(d)]).life;
        let role = &mut scene.decode[usize::from(d)];
        let (next, said) = self.consumers.tell(*role, input)?;
        *role = next;
        for &output in said.iter() {
            let message = match output {
                consumer::Output::Accepted(req) => Message::Decoded(req, d, Decoded::Accepted),
                consumer::Output::Refused(req) => Message::Decoded(req, d, Decoded::Refused),
                consumer::Output::TooFull(req) => Message::Decoded(req, d, Decoded::TooFull),
                consumer::Output::LoadFailed(req) => Message::Decoded(req, d, Decoded::LoadFailed),
                consumer::Output::Broken(req) => Message::Decoded(req, d, Decoded::Broken),
                consumer::Output::Complete(req) => Message::Streamed(req, d, Streamed::Complete),
                consumer::Output::BrokenStream(req) => Message::Streamed(req, d, Streamed::Broken),
                consumer::Output::Notice(lease) => Message::Notice(d, lease),
                consumer::Output::ReaderLeaves(req, rank, lease) => {
                    Message::ReaderLeaves(ReaderName { d, life, req, rank }, lease)
                }
            };
            self.send(scene, message);
        }
        Ok(())
    }

    fn send(&mut self, scene: &mut Scene, message: Message) {
        if self.bounds.has(Mutation::HangUpInsteadOfAbort) && matches!(message, Message::AbortPrefill(..)) {
            return;
        }
        let number = self.messages.number(message);
        scene.net.push(number);
    }

    fn take_off(&mut self, scene: &mut Scene, message: Message) {
        let number = self.messages.number(message);
        let at = scene.net.iter().position(|&other| other == number).expect("it is on its way");
        scene.net.swap_remove(at);
    }

    fn forget(&self, scene: &mut Scene, which: impl Fn(Message) -> bool) {
        scene.net.retain(|&number| !which(self.messages.get(number)));
    }
}

/// An engine as a request's router numbers it: by round.
fn asked(req: Req, engine: u8) -> u8 {
    req & 2 | engine
}
