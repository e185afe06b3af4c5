//! Pulls an image and prints the path of its root image:
//! `cargo run -p oci-image --example pull -- debian:12 --store /tmp/images`

use std::{path::PathBuf, time::Instant};

use anyhow::{Context, Result};
use clap::Parser;
use oci_image::{
    Client, Converter, Limits, Registries, Resources, Store,
    registry::{Endpoint, docker_config, tls},
};

#[derive(Parser)]
struct Args {
    reference: String,
    #[arg(long)]
    store: PathBuf,
    /// `DOMAIN=URL`: endpoint for the images of a domain
    #[arg(long)]
    endpoint: Vec<String>,
    /// Docker's config.json with credentials
    #[arg(long)]
    docker_config: Option<PathBuf>,
    /// Path of the converter `cube-image`
    #[arg(long)]
    program: PathBuf,
    /// Static programs for images without a shell. Without them, no files are added to the image.
    #[arg(long)]
    userland: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let mut registries = Registries::default();
    for pair in &args.endpoint {
        let (domain, url) = pair.split_once('=').context("DOMAIN=URL is expected")?;
        let url: Endpoint = url.parse()?;
        let list = registries.endpoints.entry(domain.to_owned());
        list.or_default().push(url);
    }
    if let Some(path) = &args.docker_config {
        registries.credentials = docker_config(&std::fs::read_to_string(path)?)?;
    }
    let limits = Limits::default();
    let mut converter = Converter::new(&args.program, limits.clone(), Resources::default());
    if let Some(dir) = &args.userland {
        converter = converter.with_userland(dir)?;
    }
    let store = Store::open(&args.store, 64 << 30)?;
    let begin = Instant::now();
    let client = Client::new(registries, tls());
    let pulled = client
        .pull(&args.reference.parse()?, None, &store, &limits)
        .await?;
    eprintln!("pulled {} in {:.2?}", pulled.digest, begin.elapsed());
    eprintln!("{:?}", pulled.config.defaults);
    let begin = Instant::now();
    let image = tokio::task::block_in_place(|| converter.convert(&pulled, &store))?;
    eprintln!("converted in {:.2?}", begin.elapsed());
    println!("{}", image.path().display());
    Ok(())
}
