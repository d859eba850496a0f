//! What can be wrong with a simulated engine, and how it is asked for: `NAME[:VALUE][@ENGINE]`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::plan::Role;

/// One thing that is wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// A prefill engine computes on and lends, although its caller has left.
    NeverAbortsPrefill,
    /// A decode engine computes on although its caller has left.
    NeverAbortsDecode,
    /// What was lent stays lent until it is read or its time is up, whatever is released.
    StrandsGap,
    /// The blocks of a lease that is released are put on the free list twice.
    DoubleFree,
    /// A decode engine says that it has read before it reads: what it reads may be another request's.
    StaleBlocks,
    /// After an abort nothing is computed for so long, for anybody.
    StallsBystanders(Duration),
    /// A decode engine refuses this share of its requests with 503.
    Refuses(f64),
    /// The engine ends, with its connections, so long after its start.
    Dies(Duration),
}

/// For so long nobody is served after an abort, under [`Fault::StallsBystanders`], where nothing else is said.
const STALL: Duration = Duration::from_millis(300);
/// An engine that stalls longer is one that has died.
const STALL_MAX: Duration = Duration::from_secs(60);
/// So much later than it says a decode engine reads, under [`Fault::StaleBlocks`].
pub(super) const READS_LATER: Duration = Duration::from_millis(50);

/// Every name, with what it may be given.
const NAMES: [(&str, Fault); 8] = [
    ("never-aborts-prefill", Fault::NeverAbortsPrefill),
    ("never-aborts-decode", Fault::NeverAbortsDecode),
    ("strands-gap", Fault::StrandsGap),
    ("double-free", Fault::DoubleFree),
    ("stale-blocks", Fault::StaleBlocks),
    ("stalls-uncancelled", Fault::StallsBystanders(STALL)),
    ("refuses", Fault::Refuses(0.5)),
    ("dies", Fault::Dies(Duration::from_secs(5))),
];

impl Fault {
    /// Every fault, with its value where none is given.
    pub const ALL: [Self; 8] = {
        let mut all = [Self::StrandsGap; 8];
        let mut at = 0;
        while at < NAMES.len() {
            all[at] = NAMES[at].1;
            at += 1;
        }
        all
    };

    /// As it is asked for, without a value.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NeverAbortsPrefill => "never-aborts-prefill",
            Self::NeverAbortsDecode => "never-aborts-decode",
            Self::StrandsGap => "strands-gap",
            Self::DoubleFree => "double-free",
            Self::StaleBlocks => "stale-blocks",
            Self::StallsBystanders(_) => "stalls-uncancelled",
            Self::Refuses(_) => "refuses",
            Self::Dies(_) => "dies",
        }
    }

    /// Whose it is where no engine is named; `None`: everybody's.
    fn role(self) -> Option<Role> {
        match self {
            Self::NeverAbortsPrefill | Self::StrandsGap | Self::DoubleFree => Some(Role::Prefill),
            Self::NeverAbortsDecode | Self::StaleBlocks | Self::Refuses(_) => Some(Role::Decode),
            Self::StallsBystanders(_) | Self::Dies(_) => None,
        }
    }
}

/// What is wrong with one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    pub(super) never_aborts_prefill: bool,
    pub(super) never_aborts_decode: bool,
    pub(super) strands_gap: bool,
    pub(super) double_free: bool,
    pub(super) stale_blocks: bool,
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
            Fault::StallsBystanders(pause) => self.stalls_bystanders = Some(pause),
            Fault::Refuses(share) => self.refuses = Some(share),
            Fault::Dies(after) => self.dies = Some(after),
        }
    }
}

/// A fault and whose it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultAt {
    /// What is wrong.
    pub fault: Fault,
    /// With whom; `None`: with every engine that can have it.
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
            // An end of everything would be no fault but an end: one of them.
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
    fn a_fault_is_read_as_it_is_written() {
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
