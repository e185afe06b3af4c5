//! Measures the cost of first cells in clones and forks, comparing variants in one run. A variant is a VMM and a
//! template. Clones of the variants take turns, so that other load on the host affects all variants equally.
//!
//! ```text
//! cargo run --release -p interpreter --example first-cell -- \
//!     now=target/cube/bin/cube-vmm,target/cube/templates/code-interpreter-v1 before=…,…
//! ```
//! Templates are loaded into huge pages, as servers do. Must run as root.

mod cost;
mod trace;
mod vm;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;

use cost::{Cost, Stage};
use trace::Trace;
use vm::{Parent, Source};

#[derive(Debug, Parser)]
#[command(about = "What the first cells of clones and forks cost, variant against variant")]
struct Cli {
    /// Variants, each as NAME=VMM,TEMPLATE.
    #[arg(required = true, value_parser = variant)]
    variants: Vec<VariantSpec>,
    /// Number of clones and forks of each variant.
    #[arg(long, default_value_t = 12)]
    rounds: usize,
    /// The measured cell, which must have a result. Parents of forks have run 1+1.
    #[arg(long, default_value = "1+1")]
    cell: String,
}

#[derive(Clone, Debug)]
struct VariantSpec {
    name: String,
    vmm: PathBuf,
    template: PathBuf,
}

fn variant(word: &str) -> Result<VariantSpec> {
    let parts = word.split_once('=').and_then(|(name, rest)| {
        let (vmm, template) = rest.split_once(',')?;
        Some(VariantSpec {
            name: name.to_owned(),
            vmm: vmm.into(),
            template: template.into(),
        })
    });
    parts.with_context(|| format!("{word} is not NAME=VMM,TEMPLATE"))
}

/// A variant, and the costs of its clones and forks so far.
struct Variant {
    name: String,
    parent: Parent,
    samples: Vec<(Source, Stage, Cost)>,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let mut variants = Vec::new();
    for spec in &cli.variants {
        variants.push(Variant {
            name: spec.name.clone(),
            parent: Parent::start(&spec.vmm, &spec.template, &cli.cell)
                .with_context(|| format!("cannot prepare {}", spec.name))?,
            samples: Vec::new(),
        });
    }
    for _ in 0..cli.rounds {
        one_round(&mut variants, None)?;
    }
    if let Some(trace) = Trace::begin() {
        one_round(&mut variants, Some(&trace))?;
    }
    report(&variants, cli.rounds);
    Ok(())
}

/// Runs one clone and one fork of each variant.
fn one_round(variants: &mut [Variant], trace: Option<&Trace>) -> Result<()> {
    for source in Source::ALL {
        for variant in variants.iter_mut() {
            let costs = variant.parent.one_life(source, trace)?;
            let costs = costs.into_iter();
            let known = costs.map(|(stage, cost)| (source, stage, cost));
            variant.samples.extend(known);
        }
    }
    Ok(())
}

fn report(variants: &[Variant], rounds: usize) {
    println!("medians of {rounds} lives each; {}", cost::LEGEND);
    for source in Source::ALL {
        for stage in Stage::ALL {
            for variant in variants {
                let of = |(from, at, cost): &(Source, Stage, Cost)| {
                    (*from == source && *at == stage).then_some(*cost)
                };
                let costs: Vec<Cost> = variant.samples.iter().filter_map(of).collect();
                let (name, medians) = (&variant.name, cost::medians(&costs));
                println!("{source:<5} {stage:<6} {name:<10} {medians}");
            }
        }
    }
}
