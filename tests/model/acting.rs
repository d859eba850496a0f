//! The effect of each step: the event of an actor, its outputs, and the messages that follow.

use baton_connector::fetch::Verification;

use crate::consumer::{self, CopyResult, ReadReply, Worker};
use crate::messages::{Loss, Message};
use crate::mutations::Mutation;
use crate::names::{LeaseName, ReaderName, Req, place};
use crate::producer::{self, Content};
use crate::router::{self, DecodeReply, PrefillReply, StreamEnd};
use crate::steps::{AdmissionChoice, MailFate, Step};
use crate::system::{SystemModel, WorkingState};

/// The error describes what was broken.
type CheckResult = Result<(), String>;

impl SystemModel {
    /// Takes one step.
    pub(crate) fn play(&mut self, scene: &mut WorkingState, step: Step) -> CheckResult {
        match step {
            Step::Arrive(message, mood) => {
                self.take_off(scene, message);
                self.arrive(scene, message, mood)
            }
            Step::AskPrefill(req, p) => self.step_router(scene, req, router::RouterInput::AskPrefill(p)),
            Step::AskDecode(req, d) => self.step_router(scene, req, router::RouterInput::AskDecode(d)),
            Step::SkipPrefill(req) => self.step_router(scene, req, router::RouterInput::SkipPrefill),
            Step::HandoffSpent(req) => self.step_router(scene, req, router::RouterInput::HandoffSpent),
            Step::ProducerFailed(req) => self.step_router(scene, req, router::RouterInput::ProducerFailed),
            Step::NotAdmitted(req) => self.step_router(scene, req, router::RouterInput::NotAdmitted),
            Step::GiveUp(req) => self.step_router(scene, req, router::RouterInput::GiveUp),
            Step::ClientCancels(req) => self.step_router(scene, req, router::RouterInput::ClientCancels),
            Step::Start(p, req) => self.step_producer(scene, p, producer::ProducerInput::Start(req)),
            Step::OpenLeaseEarly(p, req) => {
                self.step_producer(scene, p, producer::ProducerInput::OpenLeaseEarly(req))
            }
            Step::Finish(p, req) => self.step_producer(scene, p, producer::ProducerInput::Finish(req)),
            Step::EndPrefill(p, req) => {
                self.step_producer(scene, p, producer::ProducerInput::EndPrefill(req))
            }
            Step::TakeMail(p, req) => self.step_producer(scene, p, producer::ProducerInput::TakeMail(req)),
            Step::TimePasses(p) => self.step_producer(scene, p, producer::ProducerInput::TimePasses(None)),
            Step::RestartPrefill(p) => self.step_producer(scene, p, producer::ProducerInput::Restart),
            Step::Schedule(d, req) => self.step_consumer(scene, d, consumer::ConsumerInput::Schedule(req)),
            Step::FindCached(d, req) => {
                self.step_consumer(scene, d, consumer::ConsumerInput::FindCached(req))
            }
            Step::AskToRead(d, req, rank) => self.ask_to_read(scene, (d, req, rank)),
            Step::AskAgain(d, req, rank) => self.ask_again(scene, (d, req, rank)),
            Step::Copy(d, req, rank) => self.copy(scene, d, req, rank),
            Step::StopRead(d, req, rank) => {
                self.step_consumer(scene, d, consumer::ConsumerInput::ReadEnds(req, rank))
            }
            Step::AskVerdict(d, req, rank) => self.ask_verdict(scene, (d, req, rank)),
            Step::Heartbeat(d, req) => self.heartbeat(scene, d, req),
            Step::FirstToken(d, req) => {
                self.step_consumer(scene, d, consumer::ConsumerInput::FirstToken(req))
            }
            Step::Complete(d, req) => self.step_consumer(scene, d, consumer::ConsumerInput::Finish(req)),
            Step::RestartDecode(d) => self.step_consumer(scene, d, consumer::ConsumerInput::Restart),
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

    fn fault(&mut self, scene: &mut WorkingState, step: Step) -> CheckResult {
        match step {
            // The message also stays on its way.
            Step::ArriveTwice(message) => self.arrive(scene, message, AdmissionChoice::Takes),
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
            Step::Silence(req) => self.step_router(scene, req, router::RouterInput::Silence),
            Step::PrefillSilence(req) => self.step_router(scene, req, router::RouterInput::PrefillSilence),
            Step::ReadBreaks(d, req, rank) => {
                self.step_consumer(scene, d, consumer::ConsumerInput::ReadEnds(req, rank))
            }
            Step::AnswerLost(d, req, rank) => {
                // P has a reader that D does not know. The end of the connection shows P its end.
                let (reader, lease) = self.reads(scene, (d, req, rank));
                self.begin_read(scene, reader, lease)?;
                self.send(scene, Message::ReaderDeparts(reader, lease));
                self.step_consumer(
                    scene,
                    d,
                    consumer::ConsumerInput::ReadReplied(req, rank, ReadReply::Unreachable),
                )
            }
            Step::AskTwice(d, req, rank) => {
                let (reader, lease) = self.reads(scene, (d, req, rank));
                self.finish_read(scene, reader, lease)?;
                self.ask_verdict(scene, (d, req, rank))
            }
            Step::RunsOutEarly(p, renewed) => {
                self.step_producer(scene, p, producer::ProducerInput::TimePasses(renewed))
            }
            Step::AgesPass(p) => self.step_producer(scene, p, producer::ProducerInput::AgesPass),
            Step::CrashPrefill(p) => self.step_producer(scene, p, producer::ProducerInput::Crash),
            Step::CrashDecode(d, memory) => {
                if memory == MailFate::Lost {
                    self.forget(scene, |message| message.is_of_decode(d));
                }
                self.step_consumer(scene, d, consumer::ConsumerInput::Crash)
            }
            Step::CrashRouter(memory) => {
                scene.router_up = false;
                if memory == MailFate::Lost {
                    self.forget(scene, Message::is_of_router);
                }
                for req in 0..self.bounds.requests {
                    if self.routers.view(scene.router[place(req)]).has_begun() {
                        self.step_router(scene, req, router::RouterInput::Crash)?;
                    }
                }
                Ok(())
            }
            _ => unreachable!("not a fault"),
        }
    }

    /// Delivers a message to its receiver.
    fn arrive(&mut self, scene: &mut WorkingState, message: Message, mood: AdmissionChoice) -> CheckResult {
        match message {
            Message::Prefill(req, p) => {
                let admission = match mood {
                    AdmissionChoice::Takes => producer::PrefillAdmission::Take,
                    AdmissionChoice::TooFull => producer::PrefillAdmission::TooFull,
                    AdmissionChoice::Refuses => producer::PrefillAdmission::Refuse,
                };
                if self.producer_is_up(scene, p) {
                    return self.step_producer(scene, p, producer::ProducerInput::Prefill(req, admission));
                }
                self.send(scene, Message::Prefilled(req, p, PrefillReply::NotReached));
                Ok(())
            }
            Message::AbortPrefill(req, p) => {
                self.step_producer_if_up(scene, p, producer::ProducerInput::Abort(req))
            }
            Message::HangUpPrefill(req, p) => {
                self.step_producer_if_up(scene, p, producer::ProducerInput::HangUp(req))
            }
            Message::Release(lease) | Message::Notice(_, lease) => self.release(scene, lease),
            Message::ReaderDeparts(reader, lease) => {
                let alive = self.producer_is_up_for(scene, lease);
                let input = producer::ProducerInput::ReadFailed(lease.local, reader);
                if alive { self.step_producer(scene, lease.p, input) } else { Ok(()) }
            }
            Message::Decode(req, d, lease) => {
                let admission = match mood {
                    AdmissionChoice::Takes => consumer::DecodeAdmission::Take,
                    AdmissionChoice::TooFull => consumer::DecodeAdmission::TooFull,
                    AdmissionChoice::Refuses => consumer::DecodeAdmission::Refuse,
                };
                if self.consumers.view(scene.decode[usize::from(d)]).alive {
                    return self.step_consumer(
                        scene,
                        d,
                        consumer::ConsumerInput::Decode(req, lease, admission),
                    );
                }
                self.send(scene, Message::Decoded(req, d, DecodeReply::NotReached));
                Ok(())
            }
            Message::AbortDecode(req, d) => {
                self.step_consumer_if_up(scene, d, None, consumer::ConsumerInput::Abort(req))
            }
            Message::HangUpDecode(req, d) => {
                self.step_consumer_if_up(scene, d, None, consumer::ConsumerInput::HangUp(req))
            }
            Message::Verdict(ReaderName { d, life, req, rank }, answer) => self.step_consumer_if_up(
                scene,
                d,
                Some(life),
                consumer::ConsumerInput::Verdict(req, rank, answer),
            ),
            Message::LeaseGone(ReaderName { d, life, req, .. }) => {
                self.step_consumer_if_up(scene, d, Some(life), consumer::ConsumerInput::LeaseGone(req))
            }
            Message::Prefilled(req, p, what) => self.prefilled(scene, req, p, what),
            Message::PrefillEnds(req, p, lease) => self.prefill_ends(scene, req, p, lease),
            Message::Decoded(req, d, what) => self.step_router_if_up(
                scene,
                req,
                router::RouterInput::Decoded(engine_of_round(req, d), what),
            ),
            Message::Streamed(req, d, how) => self.step_router_if_up(
                scene,
                req,
                router::RouterInput::Streamed(engine_of_round(req, d), how),
            ),
        }
    }

    /// The response of a prefill. If its connection is gone, P cannot write it and ends its lease.
    fn prefilled(&mut self, scene: &mut WorkingState, req: Req, p: u8, what: PrefillReply) -> CheckResult {
        let over = self.routers.view(scene.router[place(req)]).is_over();
        if over && self.bounds.has(Mutation::HangUpInsteadOfAbort) {
            return Ok(());
        }
        if self.routers.view(scene.router[place(req)]).open_prefill[usize::from(engine_of_round(req, p))] {
            return self.step_router(
                scene,
                req,
                router::RouterInput::Prefilled(engine_of_round(req, p), what),
            );
        }
        match what {
            PrefillReply::Lent(lease) | PrefillReply::Lending(lease) => self.release(scene, lease),
            _ => Ok(()),
        }
    }

    /// The end of a response after an early lease. The same holds.
    fn prefill_ends(
        &mut self,
        scene: &mut WorkingState,
        req: Req,
        p: u8,
        lease: Option<LeaseName>,
    ) -> CheckResult {
        if self.routers.view(scene.router[place(req)]).open_prefill[usize::from(engine_of_round(req, p))] {
            return self.step_router(
                scene,
                req,
                router::RouterInput::PrefillEnds(engine_of_round(req, p), lease.is_some()),
            );
        }
        lease.map_or(Ok(()), |lease| self.release(scene, lease))
    }

    fn release(&mut self, scene: &mut WorkingState, lease: LeaseName) -> CheckResult {
        self.step_producer_if_up(scene, lease.p, producer::ProducerInput::Release(lease.local))
    }

    fn reads(&self, scene: &WorkingState, (d, req, rank): (u8, Req, u8)) -> (ReaderName, LeaseName) {
        let job = self.consumers.view(scene.decode[usize::from(d)]).jobs[usize::from(req)].expect("it reads");
        (self.reader(scene, d, req, rank), job.lease.expect("it has a handoff"))
    }

    fn begin_read(
        &mut self,
        scene: &mut WorkingState,
        reader: ReaderName,
        lease: LeaseName,
    ) -> Result<ReadReply, String> {
        if !self.producer_is_up(scene, lease.p) {
            return Ok(ReadReply::Unreachable);
        }
        let input = producer::ProducerInput::ReadBegun(lease.local, reader);
        let output = self.query_producer(scene, lease.p, input)?;
        Ok(match output {
            Some(producer::ProducerOutput::Granted(block)) => ReadReply::Granted(block),
            Some(producer::ProducerOutput::NotYet(block)) => ReadReply::NotYet(block),
            Some(producer::ProducerOutput::Busy) => ReadReply::Refused,
            _ => ReadReply::Gone,
        })
    }

    fn ask_to_read(&mut self, scene: &mut WorkingState, who: (u8, Req, u8)) -> CheckResult {
        let (reader, lease) = self.reads(scene, who);
        let reply = self.begin_read(scene, reader, lease)?;
        self.step_consumer(scene, who.0, consumer::ConsumerInput::ReadReplied(who.1, who.2, reply))
    }

    fn ask_again(&mut self, scene: &mut WorkingState, (d, req, rank): (u8, Req, u8)) -> CheckResult {
        let (reader, lease) = self.reads(scene, (d, req, rank));
        let job = self.consumers.view(scene.decode[usize::from(d)]).jobs[usize::from(req)].expect("it reads");
        let Worker::Waiting(block) = job.workers[usize::from(rank)] else { unreachable!("it waits") };
        let reply = if self.producer_is_up(scene, lease.p) {
            match self.query_producer(
                scene,
                lease.p,
                producer::ProducerInput::IsReady(lease.local, reader),
            )? {
                Some(producer::ProducerOutput::Ready) => ReadReply::Granted(block),
                _ => ReadReply::Gone,
            }
        } else {
            ReadReply::Unreachable
        };
        self.step_consumer(scene, d, consumer::ConsumerInput::ReadReplied(req, rank, reply))
    }

    /// Copies the content of the block at this moment.
    fn copy(&mut self, scene: &mut WorkingState, d: u8, req: Req, rank: u8) -> CheckResult {
        let job = self.consumers.view(scene.decode[usize::from(d)]).jobs[usize::from(req)].expect("it reads");
        let (lease, worker) = (job.lease.expect("it has a handoff"), job.workers[usize::from(rank)]);
        let Worker::Granted(block) = worker else { unreachable!("it was granted") };
        let view = self.producers.view(scene.prefill[usize::from(lease.p)]);
        let good = view.alive && view.blocks[block.index()] == Content::Of(lease.local.tag());
        let bytes = if good { CopyResult::Good } else { CopyResult::Stale };
        self.step_consumer(scene, d, consumer::ConsumerInput::Copied(req, rank, bytes))
    }

    fn finish_read(
        &mut self,
        scene: &mut WorkingState,
        reader: ReaderName,
        lease: LeaseName,
    ) -> Result<Verification, String> {
        if !self.producer_is_up(scene, lease.p) {
            return Ok(Verification::Unknown);
        }
        let output =
            self.query_producer(scene, lease.p, producer::ProducerInput::ReadDone(lease.local, reader))?;
        Ok(if matches!(output, Some(producer::ProducerOutput::Valid)) {
            Verification::Valid
        } else {
            Verification::Gone
        })
    }

    fn ask_verdict(&mut self, scene: &mut WorkingState, who: (u8, Req, u8)) -> CheckResult {
        let (reader, lease) = self.reads(scene, who);
        let answer = self.finish_read(scene, reader, lease)?;
        self.step_consumer(scene, who.0, consumer::ConsumerInput::AskVerdict(who.1, who.2))?;
        self.send(scene, Message::Verdict(reader, answer));
        Ok(())
    }

    fn heartbeat(&mut self, scene: &mut WorkingState, d: u8, req: Req) -> CheckResult {
        let (reader, lease) = self.reads(scene, (d, req, 0));
        let output = self.query_producer(scene, lease.p, producer::ProducerInput::Heartbeat(lease.local))?;
        if matches!(output, Some(producer::ProducerOutput::Gone)) {
            self.send(scene, Message::LeaseGone(reader));
        }
        Ok(())
    }

    fn producer_is_up(&self, scene: &WorkingState, p: u8) -> bool {
        self.producers.view(scene.prefill[usize::from(p)]).alive
    }

    /// Whether P is still the process that opened a lease.
    fn producer_is_up_for(&self, scene: &WorkingState, lease: LeaseName) -> bool {
        let view = self.producers.view(scene.prefill[usize::from(lease.p)]);
        view.alive && view.life == lease.local.life
    }

    fn step_router_if_up(
        &mut self,
        scene: &mut WorkingState,
        req: Req,
        input: router::RouterInput,
    ) -> CheckResult {
        if self.routers.view(scene.router[place(req)]).crashed {
            return Ok(());
        }
        self.step_router(scene, req, input)
    }

    fn step_router(&mut self, scene: &mut WorkingState, req: Req, input: router::RouterInput) -> CheckResult {
        let id = &mut scene.router[place(req)];
        let (next, outputs) = self.routers.apply(*id, input)?;
        *id = next;
        for &output in outputs.iter() {
            let of = |at: u8| (req & 1 | at & 2, at & 1);
            let message = match output {
                router::RouterOutput::Prefill(at) => Message::Prefill(of(at).0, of(at).1),
                router::RouterOutput::Decode(at, lease) => Message::Decode(of(at).0, of(at).1, lease),
                router::RouterOutput::AbortPrefill(at) => Message::AbortPrefill(of(at).0, of(at).1),
                router::RouterOutput::Release(_) if self.bounds.foreign_router => continue,
                router::RouterOutput::Release(lease) => Message::Release(lease),
                router::RouterOutput::AbortDecode(at) => Message::AbortDecode(of(at).0, of(at).1),
                router::RouterOutput::HangUpPrefill(at) => Message::HangUpPrefill(of(at).0, of(at).1),
                router::RouterOutput::HangUpDecode(at) => Message::HangUpDecode(of(at).0, of(at).1),
            };
            self.send(scene, message);
        }
        Ok(())
    }

    fn step_producer_if_up(
        &mut self,
        scene: &mut WorkingState,
        p: u8,
        input: producer::ProducerInput,
    ) -> CheckResult {
        if self.producer_is_up(scene, p) { self.step_producer(scene, p, input) } else { Ok(()) }
    }

    fn step_producer(
        &mut self,
        scene: &mut WorkingState,
        p: u8,
        input: producer::ProducerInput,
    ) -> CheckResult {
        self.query_producer(scene, p, input).map(drop)
    }

    /// Applies an event to a prefill engine. Returns its direct reply.
    fn query_producer(
        &mut self,
        scene: &mut WorkingState,
        p: u8,
        input: producer::ProducerInput,
    ) -> Result<Option<producer::ProducerOutput>, String> {
        let id = &mut scene.prefill[usize::from(p)];
        let (next, outputs) = self.producers.apply(*id, input)?;
        *id = next;
        let mut answer = None;
        for &output in outputs.iter() {
            let (req, what) = match output {
                producer::ProducerOutput::Lent(req, local) => {
                    (req, PrefillReply::Lent(LeaseName { p, local }))
                }
                producer::ProducerOutput::Lending(req, local) => {
                    (req, PrefillReply::Lending(LeaseName { p, local }))
                }
                producer::ProducerOutput::Ends(req, local) => {
                    let sealed = local.map(|local| LeaseName { p, local });
                    self.send(scene, Message::PrefillEnds(req, p, sealed));
                    continue;
                }
                producer::ProducerOutput::Empty(req) => (req, PrefillReply::Empty),
                producer::ProducerOutput::TooFull(req) => (req, PrefillReply::TooFull),
                producer::ProducerOutput::Refused(req) => (req, PrefillReply::Refused),
                producer::ProducerOutput::Broken(req) => (req, PrefillReply::Broken),
                direct => {
                    answer = Some(direct);
                    continue;
                }
            };
            self.send(scene, Message::Prefilled(req, p, what));
        }
        Ok(answer)
    }

    fn step_consumer_if_up(
        &mut self,
        scene: &mut WorkingState,
        d: u8,
        life: Option<u8>,
        input: consumer::ConsumerInput,
    ) -> CheckResult {
        let view = self.consumers.view(scene.decode[usize::from(d)]);
        let there = view.alive && life.is_none_or(|life| life == view.life);
        if there { self.step_consumer(scene, d, input) } else { Ok(()) }
    }

    fn step_consumer(
        &mut self,
        scene: &mut WorkingState,
        d: u8,
        input: consumer::ConsumerInput,
    ) -> CheckResult {
        let life = self.consumers.view(scene.decode[usize::from(d)]).life;
        let id = &mut scene.decode[usize::from(d)];
        let (next, outputs) = self.consumers.apply(*id, input)?;
        *id = next;
        for &output in outputs.iter() {
            let message = match output {
                consumer::ConsumerOutput::Accepted(req) => Message::Decoded(req, d, DecodeReply::Accepted),
                consumer::ConsumerOutput::Refused(req) => Message::Decoded(req, d, DecodeReply::Refused),
                consumer::ConsumerOutput::TooFull(req) => Message::Decoded(req, d, DecodeReply::TooFull),
                consumer::ConsumerOutput::LoadFailed(req) => {
                    Message::Decoded(req, d, DecodeReply::LoadFailed)
                }
                consumer::ConsumerOutput::Broken(req) => Message::Decoded(req, d, DecodeReply::Broken),
                consumer::ConsumerOutput::Complete(req) => Message::Streamed(req, d, StreamEnd::Complete),
                consumer::ConsumerOutput::BrokenStream(req) => Message::Streamed(req, d, StreamEnd::Broken),
                consumer::ConsumerOutput::Notice(lease) => Message::Notice(d, lease),
                consumer::ConsumerOutput::ReaderDeparts(req, rank, lease) => {
                    Message::ReaderDeparts(ReaderName { d, life, req, rank }, lease)
                }
            };
            self.send(scene, message);
        }
        Ok(())
    }

    fn send(&mut self, scene: &mut WorkingState, message: Message) {
        if self.bounds.has(Mutation::HangUpInsteadOfAbort) && matches!(message, Message::AbortPrefill(..)) {
            return;
        }
        let number = self.messages.number(message);
        scene.net.push(number);
    }

    fn take_off(&mut self, scene: &mut WorkingState, message: Message) {
        let number = self.messages.number(message);
        let at = scene.net.iter().position(|&other| other == number).expect("it is on its way");
        scene.net.swap_remove(at);
    }

    fn forget(&self, scene: &mut WorkingState, which: impl Fn(Message) -> bool) {
        scene.net.retain(|&number| !which(self.messages.get(number)));
    }
}

/// The number of an engine in a request's router: by round.
fn engine_of_round(req: Req, engine: u8) -> u8 {
    req & 2 | engine
}
