//! Faults of simulated engines, and their notation `NAME[:VALUE][@ENGINE]`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::role::Role;

/// A fault of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// A prefill engine continues and leases its blocks, although its caller has disconnected.
    NeverAbortsPrefill,
    /// A decode engine continues although its caller has disconnected.
    NeverAbortsDecode,
    /// A lease ends only by a read or by expiry. Releases have no effect.
    StrandsGap,
    /// The blocks of a released lease are put on the free list twice.
    DoubleFree,
    /// A decode engine ends its read before it reads, so that it may read another request's blocks.
    StaleBlocks,
    /// A decode engine frees the blocks of a cancelled request before the prefill engine's write into them.
    FreesBeforeWrite,
    /// After an abort, no request progresses for this time.
    StallsBystanders(Duration),
    /// A decode engine refuses this fraction of its requests with 503.
    Refuses(f64),
    /// The engine ends this long after its start, with its connections.
    Dies(Duration),
}

/// Default time of [`Fault::StallsBystanders`].
const STALL: Duration = Duration::from_millis(300);
/// Maximum time of a stall.
const STALL_MAX: Duration = Duration::from_secs(60);
/// Delay of reads under [`Fault::StaleBlocks`].
pub(super) const READS_LATER: Duration = Duration::from_millis(50);

/// Every name with its default value.
const NAMES: [(&str, Fault); 9] = [
    ("never-aborts-prefill", Fault::NeverAbortsPrefill),
    ("never-aborts-decode", Fault::NeverAbortsDecode),
    ("strands-gap", Fault::StrandsGap),
    ("double-free", Fault::DoubleFree),
    ("stale-blocks", Fault::StaleBlocks),
    ("frees-before-write", Fault::FreesBeforeWrite),
    ("stalls-uncancelled", Fault::StallsBystanders(STALL)),
    ("refuses", Fault::Refuses(0.5)),
    ("dies", Fault::Dies(Duration::from_secs(5))),
];

impl Fault {
    /// Every fault with its default value.
    pub const ALL: [Self; 9] = {
        let mut all = [Self::StrandsGap; 9];
        let mut at = 0;
        while at < NAMES.len() {
            all[at] = NAMES[at].1;
            at += 1;
        }
        all
    };

    /// The name in the notation, without a value.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NeverAbortsPrefill => "never-aborts-prefill",
            Self::NeverAbortsDecode => "never-aborts-decode",
            Self::StrandsGap => "strands-gap",
            Self::DoubleFree => "double-free",
            Self::StaleBlocks => "stale-blocks",
            Self::FreesBeforeWrite => "frees-before-write",
            Self::StallsBystanders(_) => "stalls-uncancelled",
            Self::Refuses(_) => "refuses",
            Self::Dies(_) => "dies",
        }
    }

    /// The role of engines with this fault, if no engine is named. `None` for both.
    fn role(self) -> Option<Role> {
        match self {
            Self::NeverAbortsPrefill | Self::StrandsGap | Self::DoubleFree => Some(Role::Prefill),
            Self::NeverAbortsDecode | Self::StaleBlocks | Self::FreesBeforeWrite | Self::Refuses(_) => {
                Some(Role::Decode)
            }
            Self::StallsBystanders(_) | Self::Dies(_) => None,
        }
    }
}

/// The faults of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    pub(super) never_aborts_prefill: bool,
    pub(super) never_aborts_decode: bool,
    pub(super) strands_gap: bool,
    pub(super) double_free: bool,
    pub(super) stale_blocks: bool,
    pub(super) frees_before_write: bool,
    pub(super) stalls_bystanders: Option<Duration>,
    pub(super) refuses: Option<f64>,
    pub(super) dies: Option<Duration>,
}

impl Faults {
    pub(super) fn plant(&mut self, fault: Fault) {
        match fault {
            Fault::NeverAbortsPrefill => self.never_aborts_prefill = true,
            Fault::NeverAbortsDecode => self.never_aborts_decode = true,
            Fault::StrandsGap => self.strands_gap = true,
            Fault::DoubleFree => self.double_free = true,
            Fault::StaleBlocks => self.stale_blocks = true,
            Fault::FreesBeforeWrite => self.frees_before_write = true,
            Fault::StallsBystanders(pause) => self.stalls_bystanders = Some(pause),
            Fault::Refuses(share) => self.refuses = Some(share),
            Fault::Dies(after) => self.dies = Some(after),
        }
    }
}

/// A fault and its engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultAt {
    /// The fault.
    pub fault: Fault,
    /// The engine. `None` for every engine that can have the fault.
    pub at: Option<(Role, usize)>,
}

impl From<Fault> for FaultAt {
    fn from(fault: Fault) -> Self {
        Self { fault, at: None }
    }
}

impl FaultAt {
    pub(super) fn is_at(&self, role: Role, number: usize) -> bool {
        match self.at {
            Some(at) => at == (role, number),
            // Without a name only one engine dies, because otherwise no engine would remain.
            None if matches!(self.fault, Fault::Dies(_)) => (role, number) == (Role::Decode, 0),
            None => self.fault.role().is_none_or(|of| of == role),
        }
    }
}

impl fmt::Display for FaultAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.fault.name())?;
        match self.fault {
            Fault::Refuses(share) => write!(f, ":{share}")?,
            Fault::Dies(after) => write!(f, ":{}s", after.as_secs_f64())?,
            Fault::StallsBystanders(pause) => write!(f, ":{}ms", pause.as_secs_f64() * 1e3)?,
            _ => {}
        }
        match self.at {
            Some((role, number)) => write!(f, "@{}-{number}", role.label()),
            None => Ok(()),
        }
    }
}

impl FromStr for FaultAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (what, at) = text.split_once('@').map_or((text, None), |(what, at)| (what, Some(at)));
        let (name, value) = what.split_once(':').map_or((what, None), |(name, value)| (name, Some(value)));
        let found = NAMES.iter().find(|(known, _)| *known == name).map(|(_, fault)| *fault);
        let names = || NAMES.map(|(name, _)| name).join(", ");
        let fault = match (found.ok_or_else(|| format!("`{name}` is none of {}", names()))?, value) {
            (fault, None) => fault,
            (Fault::Refuses(_), Some(value)) => {
                let share = value.parse().ok().filter(|share| (0.0..=1.0).contains(share));
                Fault::Refuses(share.ok_or_else(|| format!("`{value}` is no share between 0 and 1"))?)
            }
            (Fault::Dies(_), Some(value)) => {
                let seconds: Option<f64> = value.strip_suffix('s').unwrap_or(value).parse().ok();
                let after = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                Fault::Dies(after.ok_or_else(|| format!("`{value}` is no time such as 5s"))?)
            }
            (Fault::StallsBystanders(_), Some(value)) => {
                let ms: Option<f64> = value.strip_suffix("ms").unwrap_or(value).parse().ok();
                let pause = ms.and_then(|ms| Duration::try_from_secs_f64(ms / 1e3).ok());
                let pause = pause.filter(|pause| *pause <= STALL_MAX);
                Fault::StallsBystanders(pause.ok_or_else(|| format!("`{value}` is no time such as 20ms"))?)
            }
            (_, Some(_)) => return Err(format!("`{name}` takes no value")),
        };
        let at = at
            .map(|engine| named(engine).ok_or_else(|| format!("`{engine}` is no engine such as prefill-0")));
        Ok(Self { fault, at: at.transpose()? })
    }
}

fn named(engine: &str) -> Option<(Role, usize)> {
    let (role, number) = engine.split_once('-')?;
    let role = [Role::Prefill, Role::Decode].into_iter().find(|known| known.label() == role)?;
    Some((role, number.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_round_trips_as_text() {
        for (name, fault) in NAMES {
            assert_eq!(fault.name(), name);
            let at = FaultAt { fault, at: Some((Role::Decode, 3)) };
            assert_eq!(at.to_string().parse(), Ok(at));
            assert_eq!(name.parse(), Ok(FaultAt::from(fault)));
        }
        let stalls = Fault::StallsBystanders(Duration::from_millis(20));
        for written in ["stalls-uncancelled:20", "stalls-uncancelled:20ms"] {
            assert_eq!(written.parse(), Ok(FaultAt::from(stalls)));
        }
        assert_eq!("refuses:0.25".parse::<FaultAt>().map(|at| at.fault), Ok(Fault::Refuses(0.25)));
        for bad in [
            "",
            "x",
            "refuses:2",
            "refuses:",
            "dies:-1",
            "dies:x",
            "stalls-uncancelled:-1",
            "stalls-uncancelled:20s",
            "stalls-uncancelled:61000",
            "strands-gap:1",
            "dies@decode",
            "dies@x-1",
        ] {
            assert!(bad.parse::<FaultAt>().is_err(), "{bad}");
        }
    }
}
