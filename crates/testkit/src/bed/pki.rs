//! The cluster's certificate authority. It lives in the owner's memory; components get files.

use super::BedError;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose, SanType,
};
use std::net::IpAddr;

/// A certificate and its key, as PEM.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
}

/// Signs certificates that the cluster believes.
pub(super) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    pub(super) fn new() -> Result<Self, BedError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name("partage-bed", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().map_err(sign_error)?;
        Ok(Self { issuer: CertifiedIssuer::self_signed(params, key).map_err(sign_error)? })
    }

    /// The authority's own certificate.
    pub(super) fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Its key, for the controller that signs requests.
    pub(super) fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// For who calls: Kubernetes takes the user from CN and the group from O.
    pub(super) fn client(&self, user: &str, group: Option<&str>) -> Result<Certificate, BedError> {
        self.issue(name(user, group), ExtendedKeyUsagePurpose::ClientAuth, &[])
    }

    /// For who is called, under these names and addresses.
    pub(super) fn server(&self, user: &str, names: &[&str]) -> Result<Certificate, BedError> {
        self.issue(name(user, None), ExtendedKeyUsagePurpose::ServerAuth, names)
    }

    fn issue(
        &self,
        subject: DistinguishedName,
        purpose: ExtendedKeyUsagePurpose,
        names: &[&str],
    ) -> Result<Certificate, BedError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = subject;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![purpose];
        for name in names {
            params.subject_alt_names.push(match name.parse::<IpAddr>() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName((*name).try_into().map_err(sign_error)?),
            });
        }
        let key = KeyPair::generate().map_err(sign_error)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(sign_error)?;
        Ok(Certificate { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

/// A key pair that signs service account tokens: the private and the public part.
pub(super) fn token_key() -> Result<(String, String), BedError> {
    let key = KeyPair::generate().map_err(sign_error)?;
    Ok((key.serialize_pem(), key.public_key_pem()))
}

fn name(user: &str, group: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(group) = group {
        name.push(DnType::OrganizationName, group);
    }
    name.push(DnType::CommonName, user);
    name
}

fn sign_error(error: rcgen::Error) -> BedError {
    BedError::failed("making a certificate")(error)
}
