//! The cluster's certificate authority. Its key stays in memory, except for components that need it in a file.

use super::BedError;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose, SanType,
};
use std::net::IpAddr;

/// A certificate and its private key, as PEM.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The certificate, as PEM.
    pub certificate: String,
    /// Its private key, as PEM.
    pub key: String,
}

/// Signs certificates that the cluster trusts.
pub(super) struct CertificateAuthority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl CertificateAuthority {
    pub(super) fn new() -> Result<Self, BedError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = distinguished_name("partage-bed", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().map_err(signing_error)?;
        Ok(Self { issuer: CertifiedIssuer::self_signed(params, key).map_err(signing_error)? })
    }

    /// Returns the authority's own certificate.
    pub(super) fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Returns the authority's key, for the controller that signs requests.
    pub(super) fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Issues a client certificate. Kubernetes takes the user from CN and the group from O.
    pub(super) fn client(&self, user: &str, group: Option<&str>) -> Result<Certificate, BedError> {
        self.issue(distinguished_name(user, group), ExtendedKeyUsagePurpose::ClientAuth, &[])
    }

    /// Issues a server certificate for these names and addresses.
    pub(super) fn server(&self, user: &str, names: &[&str]) -> Result<Certificate, BedError> {
        self.issue(distinguished_name(user, None), ExtendedKeyUsagePurpose::ServerAuth, names)
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
                Err(_) => SanType::DnsName((*name).try_into().map_err(signing_error)?),
            });
        }
        let key = KeyPair::generate().map_err(signing_error)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(signing_error)?;
        Ok(Certificate { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

/// Returns a key pair that signs service account tokens: the private and the public part.
pub(super) fn token_key() -> Result<(String, String), BedError> {
    let key = KeyPair::generate().map_err(signing_error)?;
    Ok((key.serialize_pem(), key.public_key_pem()))
}

fn distinguished_name(user: &str, group: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(group) = group {
        name.push(DnType::OrganizationName, group);
    }
    name.push(DnType::CommonName, user);
    name
}

fn signing_error(error: rcgen::Error) -> BedError {
    BedError::failed("creating a certificate")(error)
}
