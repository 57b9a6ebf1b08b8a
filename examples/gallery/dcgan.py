# DCGAN: a generator and a discriminator that take turns, on 64 x 64 images
import torch
import torch.nn as nn
import torch.optim as optim
import torchvision.datasets as dset
import torchvision.transforms as transforms

torch.manual_seed(999)

batch_size = 128
image_size = 64
nz = 100
ngf = ndf = 64
epochs = 5
lr, beta1 = 2e-4, 0.5
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

dataset = dset.FakeData(
    size=2000,
    image_size=(3, image_size, image_size),
    transform=transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)]),
)
dataloader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=2)


def weights_init(m):
    name = type(m).__name__
    if "Conv" in name:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.zeros_(m.bias.data)


def up(cin, cout, stride=2, padding=1):
    return [
        nn.ConvTranspose2d(cin, cout, 4, stride, padding, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(True),
    ]


def down(cin, cout):
    return [nn.Conv2d(cin, cout, 4, 2, 1, bias=False), nn.BatchNorm2d(cout), nn.LeakyReLU(0.2, inplace=True)]


netG = nn.Sequential(
    *up(nz, ngf * 8, 1, 0),
    *up(ngf * 8, ngf * 4),
    *up(ngf * 4, ngf * 2),
    *up(ngf * 2, ngf),
    nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netG.apply(weights_init)

netD = nn.Sequential(
    nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    *down(ndf, ndf * 2),
    *down(ndf * 2, ndf * 4),
    *down(ndf * 4, ndf * 8),
    nn.Conv2d(ndf * 8, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
).to(device)
netD.apply(weights_init)

criterion = nn.BCELoss()
fixed_noise = torch.randn(64, nz, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=lr, betas=(beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=lr, betas=(beta1, 0.999))

G_losses, D_losses, samples = [], [], []
iteration = 0
for epoch in range(epochs):
    for i, (real, _) in enumerate(dataloader):
        # discriminator: real images towards 1, fakes towards 0
        netD.zero_grad()
        real = real.to(device)
        label = torch.full((real.size(0),), 1.0, dtype=torch.float, device=device)
        output = netD(real).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()

        noise = torch.randn(real.size(0), nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        # generator: fool the discriminator
        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        D_G_z = output.mean().item()
        optimizerG.step()

        if i % 5 == 0:
            print(
                f"[{epoch}/{epochs}][{i}/{len(dataloader)}] D {errD.item():.3f} G {errG.item():.3f} "
                f"D(x) {D_x:.3f} D(G(z)) {D_G_z:.3f}"
            )
        G_losses.append(errG.item())
        D_losses.append(errD.item())
        if iteration % 500 == 0:
            with torch.no_grad():
                samples.append(netG(fixed_noise).detach().cpu())
        iteration += 1
