# SPDX-License-Identifier: Apache-2.0
"""The answers that Windows asks for while it is installed, as data, and the small disc on which its installation looks for them.

What it does with them: takes the whole disk, with the drivers of virtio from their disc; makes one administrator, who is logged in once;
installs QEMU's guest agent from that disc, by which commands and files come. The disk is not encrypted unasked: the TPM that holds the key
would be another one in a machine that boots from a snapshot of the disk.

Letters of drives are not known beforehand, so each is tried.
"""

from __future__ import annotations

import io
from typing import Annotated
from xml.etree import ElementTree

import msgspec
from msgspec import Meta

NAME, ISO_NAME, LABEL = "autounattend.xml", "AUTOUNATTEND.XML", "ANSWERS"
UNATTEND = "urn:schemas-microsoft-com:unattend"
WCM = "http://schemas.microsoft.com/WMIConfig/2002/State"
DRIVES = "DEFG"
COMPONENT = {
    "processorArchitecture": "amd64",
    "publicKeyToken": "31bf3856ad364e35",
    "language": "neutral",
    "versionScope": "nonSxS",
}
GENERIC_KEY = "VK7JG-NPHTM-C97JM-9MPGT-3V66T"  # Microsoft's own for installing Pro, which activates nothing

Name = Annotated[str, Meta(pattern=r'^[^\x00-\x1f"/\\\[\]:;|=,+*?<>@]{1,20}$')]
Word = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]{1,127}$")]


class Answers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`drivers`: folders of the drivers' disc; `tools`: the program there that installs the guest agent, "" for none."""

    user: Name = "user"
    password: Word
    computer: Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,15}$")] = "sandbox"
    edition: Word = "Windows 11 Pro"
    product_key: Annotated[str, Meta(pattern=r"^([A-Z0-9]{5}-){4}[A-Z0-9]{5}$")] = GENERIC_KEY
    language: Annotated[str, Meta(pattern=r"^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8}){0,2}$")] = "en-US"
    time_zone: Word = "UTC"
    drivers: tuple[Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\\ -]{1,200}$")], ...] = (
        r"viostor\w11\amd64",
        r"vioscsi\w11\amd64",
        r"vioserial\w11\amd64",
        r"NetKVM\w11\amd64",
    )
    tools: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\\ -]{0,200}$")] = r"guest-agent\qemu-ga-x86_64.msi"

    def __repr__(self) -> str:
        return f"Answers(user={self.user!r}, edition={self.edition!r}, password=<hidden>)"

    __rich_repr__ = None  # type: ignore[assignment]  # msgspec's would show all fields

    def xml(self) -> bytes:
        ElementTree.register_namespace("", UNATTEND)
        ElementTree.register_namespace("wcm", WCM)
        root = ElementTree.Element(_of("unattend"))
        self._windows_pe(root)
        self._specialize(root)
        self._first_use(root)
        ElementTree.indent(root)
        return b'<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode").encode()

    def _windows_pe(self, root: ElementTree.Element) -> None:
        settings = _settings(root, "windowsPE")
        languages = _component(settings, "Microsoft-Windows-International-Core-WinPE")
        for name in ("InputLocale", "SystemLocale", "UILanguage", "UserLocale"):
            _put(languages, name, self.language)
        paths = _add(_component(settings, "Microsoft-Windows-PnpCustomizationsWinPE"), "DriverPaths")
        for number, path in enumerate((f"{drive}:\\{folder}" for drive in DRIVES for folder in self.drivers), 1):
            one = _item(paths, "PathAndCredentials")
            one.set(f"{{{WCM}}}keyValue", str(number))
            _put(one, "Path", path)
        setup = _component(settings, "Microsoft-Windows-Setup")
        configuration = _add(setup, "DiskConfiguration")
        disk = _item(configuration, "Disk")
        _put(disk, "DiskID", "0")
        _put(disk, "WillWipeDisk", "true")
        created, modified = _add(disk, "CreatePartitions"), _add(disk, "ModifyPartitions")
        for order, (kind, size, format) in enumerate((("EFI", "260", "FAT32"), ("MSR", "16", ""), ("Primary", "", "NTFS")), 1):
            one = _item(created, "CreatePartition")
            _put(one, "Order", str(order))
            _put(one, "Type", kind)
            _put(one, *(("Size", size) if size else ("Extend", "true")))
            if format:
                one = _item(modified, "ModifyPartition")
                _put(one, "Order", str(len(modified)))
                _put(one, "PartitionID", str(order))
                _put(one, "Format", format)
        image = _add(_add(setup, "ImageInstall"), "OSImage")
        data = _item(_add(image, "InstallFrom"), "MetaData")
        _put(data, "Key", "/IMAGE/NAME")
        _put(data, "Value", self.edition)
        target = _add(image, "InstallTo")
        _put(target, "DiskID", "0")
        _put(target, "PartitionID", "3")
        user = _add(setup, "UserData")
        _put(user, "AcceptEula", "true")
        key = _add(user, "ProductKey")
        _put(key, "Key", self.product_key)
        _put(key, "WillShowUI", "OnError")

    def _specialize(self, root: ElementTree.Element) -> None:
        settings = _settings(root, "specialize")
        shell = _component(settings, "Microsoft-Windows-Shell-Setup")
        _put(shell, "ComputerName", self.computer)
        _put(shell, "TimeZone", self.time_zone)
        runs = _add(_component(settings, "Microsoft-Windows-Deployment"), "RunSynchronous")
        one = _item(runs, "RunSynchronousCommand")
        _put(one, "Order", "1")
        _put(one, "Path", r"reg add HKLM\SYSTEM\CurrentControlSet\Control\BitLocker /v PreventDeviceEncryption /t REG_DWORD /d 1 /f")

    def _first_use(self, root: ElementTree.Element) -> None:
        shell = _component(_settings(root, "oobeSystem"), "Microsoft-Windows-Shell-Setup")
        screens = _add(shell, "OOBE")
        for name in ("HideEULAPage", "HideOnlineAccountScreens", "HideWirelessSetupInOOBE"):
            _put(screens, name, "true")
        _put(screens, "ProtectYourPC", "3")
        account = _item(_add(_add(shell, "UserAccounts"), "LocalAccounts"), "LocalAccount")
        _put(account, "Name", self.user)
        _put(account, "Group", "Administrators")
        self._password(account)
        logon = _add(shell, "AutoLogon")
        _put(logon, "Enabled", "true")
        _put(logon, "LogonCount", "1")
        _put(logon, "Username", self.user)
        self._password(logon)
        if self.tools:
            one = _item(_add(shell, "FirstLogonCommands"), "SynchronousCommand")
            _put(one, "Order", "1")
            drives = " ".join(DRIVES)
            _put(one, "CommandLine", f'cmd /c for %d in ({drives}) do if exist "%d:\\{self.tools}" msiexec /i "%d:\\{self.tools}" /qn')

    def _password(self, parent: ElementTree.Element) -> None:
        password = _add(parent, "Password")
        _put(password, "Value", self.password)
        _put(password, "PlainText", "true")

    def disc(self) -> bytes:
        """An ISO 9660 image with Joliet names, which has nothing but the answers."""
        import pycdlib  # here, since few edges need it

        image, made, data = pycdlib.PyCdlib(), io.BytesIO(), self.xml()
        image.new(interchange_level=3, joliet=3, vol_ident=LABEL)
        try:
            image.add_fp(io.BytesIO(data), len(data), iso_path=f"/{ISO_NAME};1", joliet_path=f"/{NAME}")
            image.write_fp(made)
        finally:
            image.close()
        return made.getvalue()


def _of(name: str) -> str:
    return f"{{{UNATTEND}}}{name}"


def _settings(root: ElementTree.Element, phase: str) -> ElementTree.Element:
    return ElementTree.SubElement(root, _of("settings"), {"pass": phase})


def _component(settings: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(settings, _of("component"), {"name": name, **COMPONENT})


def _add(parent: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(parent, _of(name))


def _item(parent: ElementTree.Element, name: str) -> ElementTree.Element:
    """One of a list."""
    return ElementTree.SubElement(parent, _of(name), {f"{{{WCM}}}action": "add"})


def _put(parent: ElementTree.Element, name: str, value: str) -> None:
    _add(parent, name).text = value
