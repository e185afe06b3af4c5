//! Cases that take more than one attempt.
//!
//! A script reports a breach for each packet that must not get through but did, and a doubt for each missing
//! observation without which it proves nothing.

mod forged;
mod inbound;
mod life;
mod load;
mod offload;
mod outcome;
mod policy;
mod reuse;
mod traffic;
mod vmm;

use super::{
    cases::{Case, Script},
    evaluate::not_tried,
    stage::Stage,
    world::Finishing,
};
use crate::{report, sandbox::Sandbox};
use outcome::ScriptError;
pub(super) use traffic::{allowing, send_until};

/// Runs the script of a case.
pub(super) fn try_script(stage: &mut Stage, neighbour: &Sandbox, case: &Case) -> report::Case {
    stage.world.capture.forget();
    let name = case.name.as_str();
    let observed = match case.script {
        Some(Script::Cut) => policy::cut(stage, name),
        Some(Script::Churn) => policy::churn(stage, name),
        Some(Script::Clear) => policy::clear(stage, name),
        Some(Script::Unsolicited) => inbound::unsolicited(stage, name),
        Some(Script::Late) => inbound::late(stage, name),
        Some(Script::Reuse) => reuse::device(stage, name),
        Some(Script::Pause) => life::pause(stage, name),
        Some(Script::Fork) => life::fork(stage, name),
        Some(Script::Crash) => life::crash(stage, name),
        Some(Script::Flood) => load::flood(stage, neighbour, name),
        Some(Script::Ports) => load::ports(stage, neighbour, name),
        Some(Script::UnfitFromGuest) => offload::from_guest(stage, name, Finishing::ByHost),
        Some(Script::UnfitFromGuestByCard) => offload::from_guest(stage, name, Finishing::ByUplink),
        Some(Script::UnfitAtTap) => offload::at_tap(stage, name, Finishing::ByHost),
        Some(Script::UnfitAtTapByCard) => offload::at_tap(stage, name, Finishing::ByUplink),
        Some(Script::Forged) => forged::errors(stage, name),
        None => Err(ScriptError::Failed("the case has no script".to_owned())),
    };
    match observed {
        Err(error) => not_tried(case, [model::chain(&error)]),
        Ok(seen) => seen.judge(not_tried(case, [])),
    }
}
