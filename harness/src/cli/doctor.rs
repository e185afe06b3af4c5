//! `cube-bench doctor`: describes and grades this host.

use std::time::Duration;

use clap::Args;
use harness::{
    host::{
        facts,
        grade::{self, Grade, NoiseLevel},
    },
    noise,
    report::doctor::{self, Diagnosis},
};
use testbed::{artifacts, exit::End, options::Places};

use super::{PlainFormat, print_json};

#[derive(Args)]
pub(super) struct Doctor {
    #[command(flatten)]
    places: Places,
    #[arg(long, value_enum, default_value_t)]
    format: PlainFormat,
}

impl Doctor {
    pub(super) fn carry_out(self) -> End {
        doctor(&self.places, self.format)
    }
}

fn doctor(places: &Places, format: PlainFormat) -> End {
    let vmm = places.vmm.clone().unwrap_or_else(artifacts::default_vmm);
    let noise = NoiseLevel::of(&[noise::look(Duration::from_secs(1))]);
    let facts = facts::read(&vmm);
    let diagnosis = Diagnosis {
        format: doctor::FORMAT,
        graded: grade::grade(&facts, noise),
        noise,
        facts,
    };
    match format {
        PlainFormat::Human => print!("{}", diagnosis.render()),
        PlainFormat::Json => print_json(&diagnosis),
    }
    match diagnosis.graded.grade {
        Grade::Publishable | Grade::Indicative => End::Pass,
        Grade::Unfit => End::UnsuitableHost,
    }
}
