//! `baton parity`.

use crate::Failure;
use crate::cli::ParityArgs;
use crate::output::CommandOutput;

pub(crate) fn run(args: &ParityArgs) -> Result<(), Failure> {
    let report = baton_engine_check::parity::run(&args.dir, args.device, &mut CommandOutput)?;
    if report.failed > 0 { Err(format!("{} cases failed", report.failed).into()) } else { Ok(()) }
}
